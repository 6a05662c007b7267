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

TINY_VERSION = 1  # of what `_BUILD_TINY` writes: a higher one makes every cache build anew
_BUILD_TINY = """
import sys, torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
source, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
tokenizer.save_pretrained(out)
"""


def tiny_model() -> Path:
    """A random two-layer Llama with the embedded model's tokenizer: an engine in seconds."""
    source = embedded.prepare()
    target = source.parent.parent / "test-models" / f"tiny-{TINY_VERSION}-{source.name}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build_tiny(source, target)
    return target


def _build_tiny(source: Path, target: Path) -> None:
    """In a child: torch must not be imported here before vLLM's environment is set."""
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        subprocess.run([sys.executable, "-c", _BUILD_TINY, source, work], check=True, capture_output=True, timeout=300)
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
