"""lm_eval over HTTP finds what it finds with vLLM's `LLM` called directly: scores, and each document's answers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.models import embedded
from tests.docs.pages import ROOT
from tests.engine.process import CLEAN_ENVIRONMENT, ServiceProcess, service_process

pytestmark = pytest.mark.engine

MODEL = "embedded:smollm2-135m"
RUN_S = 240.0
DOCUMENTS = 12
LOGPROB_DIFFERENCE = 1e-3
"""Of a text's log-likelihood. In float32 the sums depend on the neighbours in a window by less."""

Json = dict[str, Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """The embedded model in float32, in which greedy text does not depend on a window's make-up."""
    with service_process(tmp_path_factory.mktemp("embedded"), MODEL, "inline", dtype="float32") as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def findings(service: ServiceProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, Json]:
    """What lm_eval finds over HTTP, and directly."""
    folder = tmp_path_factory.mktemp("lm-eval")
    with ThreadPoolExecutor(3) as pool:
        direct = pool.submit(find_directly, folder)
        completions = pool.submit(find_over_completions, service.url, folder / "completions")
        chat = pool.submit(find_over_chat, service.url, folder / "chat")
        return _merge(completions.result(), chat.result()), direct.result()


def find_directly(folder: Path) -> Json:
    done = run([sys.executable, "-m", "tests.load.direct", str(embedded.prepare())], folder)
    return json.loads(done.splitlines()[-1])


def find_over_completions(url: str, output: Path) -> Json:
    """Log-likelihoods, with lists of token ids as prompts."""
    model = (
        f"base_url={url}/v1/completions,num_concurrent=4,tokenizer_backend=huggingface,tokenizer={embedded.prepare()}"
    )
    return lm_eval(
        "local-completions", model, output, "--batch_size", "4", tasks="batchserve_choice,batchserve_surprise"
    )


def find_over_chat(url: str, output: Path) -> Json:
    """Greedy texts."""
    model = f"base_url={url}/v1/chat/completions,num_concurrent=8"
    return lm_eval("local-chat-completions", model, output, "--apply_chat_template", tasks="batchserve_answer")


def lm_eval(kind: str, model: str, output: Path, *arguments: str, tasks: str) -> Json:
    """Run lm_eval's command; the content of the files it writes."""
    run(
        [
            str(Path(sys.executable).with_name("lm_eval")),
            *("run", "--model", kind, "--model_args", f"model={MODEL},{model}", "--tasks", tasks),
            *("--include_path", "tests/load/tasks", "--output_path", str(output), "--log_samples", *arguments),
        ],
        output.parent,
    )
    (result,) = output.rglob("results_*.json")
    return {
        "results": json.loads(result.read_text())["results"],
        "samples": {task: _answers(output, task) for task in tasks.split(",")},
    }


def _answers(output: Path, task: str) -> list[Any]:
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    return [line["resps"] for line in lines]


def run(command: list[str], cache: Path) -> str:
    """Run a command from the root of the checkout; what it printed."""
    environment = CLEAN_ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(cache / "datasets")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def _merge(one: Json, other: Json) -> Json:
    return {name: one[name] | other[name] for name in ("results", "samples")}


# --- the tests ---


def scores(finding: Json, task: str) -> dict[str, float]:
    """Each metric of a task."""
    return {name: value for name, value in finding["results"][task].items() if isinstance(value, float)}


@pytest.mark.parametrize("task", ["batchserve_choice", "batchserve_answer", "batchserve_surprise"])
def test_the_scores_are_those_of_direct_calls(findings: tuple[Json, Json], task: str) -> None:
    served, direct = (scores(finding, task) for finding in findings)

    print(task, served)
    assert served == pytest.approx(direct, rel=LOGPROB_DIFFERENCE)
    assert served, "no metric"


def test_the_scores_are_worth_comparing(findings: tuple[Json, Json]) -> None:
    served, _ = findings

    assert 0.25 < served["results"]["batchserve_choice"]["acc,none"] < 1
    assert 0 < served["results"]["batchserve_answer"]["exact_match,names-it"] < 1


@pytest.mark.parametrize(("task", "choices"), [("batchserve_choice", 4), ("batchserve_surprise", 1)])
def test_each_texts_log_likelihood_is_that_of_direct_calls(
    findings: tuple[Json, Json], task: str, choices: int
) -> None:
    served, direct = (_log_likelihoods(finding["samples"][task]) for finding in findings)

    assert len(served) == DOCUMENTS * choices
    assert [greedy for _, greedy in served] == [greedy for _, greedy in direct]
    assert [value for value, _ in served] == pytest.approx(
        [value for value, _ in direct], abs=LOGPROB_DIFFERENCE, rel=0
    )


def _log_likelihoods(samples: list[Any]) -> list[tuple[float, str]]:
    """Of each text, whether it is the greedy one beside it; a rolling log-likelihood has no such mark."""
    texts = [text for document in samples for (text,) in document]
    pairs = [text if isinstance(text, list) else (text, "") for text in texts]
    return [(float(value), str(greedy)) for value, greedy in pairs]


def test_each_greedy_text_is_that_of_direct_calls(findings: tuple[Json, Json]) -> None:
    served, direct = (finding["samples"]["batchserve_answer"] for finding in findings)

    assert served == direct
    assert len(served) == DOCUMENTS
