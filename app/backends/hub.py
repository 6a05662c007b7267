"""Looks a Hugging Face id up in the local cache and on the Hub, before vLLM is imported.

In a child process, since ``huggingface_hub`` reads its variables on being imported; and by one short question, since
vLLM asks for minutes, again and again, where there is no network.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from app.settings import child_environment, is_hub_offline

ASK_TIMEOUT_S = 10.0
CHILD_TIMEOUT_S = 60.0

Answer = Literal["yes", "offline", "unreachable", "unknown", "gated", "invalid", "unclear"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is known of an id.

    Attributes:
        folder: the snapshot in the local cache, if there is one.
        answer: what the Hub says: ``yes``, it has this model; ``offline``: it was not to be asked; ``unreachable``;
            ``unknown``: no such model, or a private one; ``gated``; ``invalid``: no id at all; ``unclear``: anything
            else, which is vLLM's to find out.
        reason: the library's words.
    """

    folder: str | None
    answer: Answer
    reason: str = ""


def look_up(model: str, revision: str | None) -> Lookup:
    """What the local cache and the Hub know of ``model``; takes a second, with a slow network ten."""
    command = [sys.executable, "-P", "-m", "app.backends.hub", json.dumps([model, revision, is_hub_offline()])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, env=child_environment({}), check=True
        )
        return Lookup(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        return Lookup(None, "unclear", type(error).__name__)


def _look_up(model: str, revision: str | None, is_offline: bool) -> Lookup:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError as error:
        return Lookup(None, "invalid", _one_line(error))
    folder = str(Path(config).parent) if isinstance(config, str) else None
    return Lookup(folder, "offline") if is_offline else Lookup(folder, *_ask(model, revision))


def _ask(model: str, revision: str | None) -> tuple[Answer, str]:
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(model, revision=revision, timeout=ASK_TIMEOUT_S)
    except errors.GatedRepoError as error:
        return "gated", _one_line(error)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        return "unknown", _one_line(error)
    except Exception as error:
        return ("unreachable" if _is_of_the_network(error) else "unclear"), _one_line(error)
    return "yes", ""


def _is_of_the_network(error: Exception) -> bool:
    """Whether no answer came at all; the library behind ``huggingface_hub`` has changed more than once."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "ConnectionError", "Timeout", "TimeoutException", "OfflineModeIsEnabled"})


def _one_line(error: Any) -> str:
    return " ".join(str(error).split())[:200]


if __name__ == "__main__":
    print(json.dumps(asdict(_look_up(*json.loads(sys.argv[1])))))
