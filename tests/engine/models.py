"""Models for the engine tests, made once and kept in the user's cache."""

import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from app.models import embedded

VERSIONS = {"text": 1, "image": 1, "audio": 1, "omni": 1}
"""Of what ``build_models.py`` makes: a higher one has every cache make it anew."""
BUILD_S = 300


def tiny_model() -> Path:
    """A random two-layer Llama with the embedded model's tokenizer: an engine in seconds."""
    return _cached("text", "tiny")


def tiny_image_model() -> Path:
    """As small a model that takes images: each becomes a few tokens, and changes a greedy text."""
    return _cached("image", "tiny-image")


def tiny_audio_model() -> Path:
    """As small a model that takes audio at 16 kHz: a second becomes 25 tokens, and changes a greedy text."""
    return _cached("audio", "tiny-audio")


def tiny_omni_model() -> Path:
    """As small a model that takes both, in one request too: an image becomes 6 tokens, a second of audio 27.

    It is served with ``trust_remote_code``, as it brings code of its own.
    """
    return _cached("omni", "tiny-omni")


def _cached(kind: str, name: str) -> Path:
    source = embedded.prepare()
    target = source.parent.parent / "test-models" / f"{name}-{VERSIONS[kind]}-{source.name}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(kind, source, target)
    return target


def _build(kind: str, source: Path, target: Path) -> None:
    """In a child: torch must not be imported here before vLLM's environment is set."""
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    script = Path(__file__).with_name("build_models.py")
    try:
        subprocess.run([sys.executable, script, kind, source, work], check=True, capture_output=True, timeout=BUILD_S)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def variant(
    source: Path,
    target: Path,
    *,
    template: str | None = None,
    generation: dict[str, object] | None = None,
    tokenizer: Callable[[dict[str, object]], None] | None = None,
    tokenizer_config: dict[str, object] | None = None,
) -> Path:
    """A copy of a model folder: its weights are linked, what is asked for differs.

    Args:
        source: the folder to copy.
        target: a folder that is not there yet.
        template: chat template; an empty one leaves the model without.
        generation: replaces ``generation_config.json``.
        tokenizer: changes the content of ``tokenizer.json`` in place.
        tokenizer_config: further members of ``tokenizer_config.json``.
    """
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file)
        else:
            shutil.copy(file, target)
    if template is not None:
        (target / "chat_template.jinja").unlink(missing_ok=True)
        if template:
            (target / "chat_template.jinja").write_text(template)
    if generation is not None:
        (target / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        _edit(target / "tokenizer.json", tokenizer)
    if tokenizer_config is not None:
        _edit(target / "tokenizer_config.json", lambda content: content.update(tokenizer_config))
    return target


def _edit(file: Path, change: Callable[[dict[str, object]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
