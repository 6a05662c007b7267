"""One engine after the other in one process, and an event loop that stays free while an engine works."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.backends.args import VLLMOfflineArgs
from app.backends.offline import VLLMOfflineBackend
from app.backends.registry import Backend
from app.errors import EngineDead, StartError
from app.request import Generation, Outcome
from app.settings import Settings
from tests.engine import faults
from tests.engine.faults import POISON
from tests.engine.inline import Inline, running, window_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

HELLO = {"prompt": "Hello", "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


@asynccontextmanager
async def opened(model: Path) -> AsyncIterator[VLLMOfflineBackend]:
    """A backend without a service around it."""
    values = {"kind": "vllm_offline", "model": str(model), "served_model_name": "own", "engine_process": "inline"}
    config = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 256}
    backend = Backend.create(VLLMOfflineArgs.model_validate({**values, "vllm_config": config}))
    assert isinstance(backend, VLLMOfflineBackend)
    try:
        await backend.open()
        yield backend
    finally:
        await backend.close()


def texts(outcomes: list[Outcome]) -> list[str]:
    found = []
    for outcome in outcomes:
        assert isinstance(outcome.result, Generation), outcome.result
        found.append(outcome.result.outputs[0].text)
    return found


@pytest.mark.usefixtures("no_engine")
async def test_open_close_and_open_again_in_one_process(tiny_model: Path) -> None:
    found = []
    for _ in range(2):
        async with opened(tiny_model) as backend:
            await backend.validate()
            found += texts(await backend.generate(await window_of(backend, [HELLO] * 3)))
            late = await window_of(backend, [HELLO])
            assert await backend.close()
            assert await backend.close()
            with pytest.raises(EngineDead):
                await backend.generate(late)
    assert len(set(found)) == 1
    assert len(found) == 6


async def test_close_is_harmless_before_open(tiny_model: Path) -> None:
    backend = VLLMOfflineBackend(VLLMOfflineArgs(kind="vllm_offline", model=str(tiny_model), served_model_name="own"))
    assert await backend.close()
    assert await backend.close()


@pytest.mark.usefixtures("no_engine")
async def test_close_gives_up_in_time_while_a_window_runs(tiny_model: Path) -> None:
    async with opened(tiny_model) as backend:
        window = await window_of(backend, [{**HELLO, "max_tokens": 100}] * 16)
        work = asyncio.create_task(backend.generate(window))
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        assert not await backend.close(timeout_s=0.3)
        assert time.monotonic() - begun < 1
        assert len(texts(await work)) == 16


async def test_the_engine_is_entered_by_its_own_thread_only(inline: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: set[str] = set()
    for owner, name in ((inline.llm, "generate"), (inline.engine, "step"), (inline.engine, "add_request")):
        monkeypatch.setattr(owner, name, _recording(getattr(owner, name), entered))
    alone = [await inline.text(prompt=f"{number} bears", max_tokens=4) for number in range(50)]
    together = await asyncio.gather(*(inline.text(prompt=f"{number} bears", max_tokens=4) for number in range(50)))
    assert together == alone
    assert entered == {"engine"}


def _recording(function: Any, entered: set[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        entered.add(threading.current_thread().name)
        return function(*args, **kwargs)

    return call


async def test_the_event_loop_stays_free_while_a_window_runs(inline: Inline) -> None:
    requests = [{"prompt": f"{number} bears", "max_tokens": 60} for number in range(100)]
    work = asyncio.create_task(inline.batch(requests, ignore_eos=True))
    late: list[float] = []
    while not work.done():
        begun = time.monotonic()
        await asyncio.sleep(0.005)
        late.append(time.monotonic() - begun - 0.005)
    await work
    assert len(late) > 20
    assert sorted(late)[int(len(late) * 0.95)] < 0.1
    assert (await inline.client.get("/livez")).status_code == 200


def cannot_be_emptied(service: Inline, patch: pytest.MonkeyPatch) -> None:
    """Leftovers that stay would come out as somebody else's text."""

    def cannot(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    faults.step_after(service, patch)
    patch.setattr(service.engine, "abort_request", cannot)


def keeps_what_it_should_abort(service: Inline, patch: pytest.MonkeyPatch) -> None:
    faults.step_after(service, patch)
    patch.setattr(service.engine, "abort_request", lambda *_, **__: None)


def says_it_is_dead(service: Inline, patch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    patch.setattr(service.engine, "step", _raising(EngineDeadError()))


def ends_its_thread(service: Inline, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(service.engine, "step", _raising(SystemExit(3)))


def _raising(error: BaseException) -> Any:
    def call() -> None:
        raise error

    return call


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    "fault",
    [cannot_be_emptied, keeps_what_it_should_abort, says_it_is_dead, ends_its_thread],
    ids=lambda fault: fault.__name__,
)
async def test_a_dead_engine_is_told_to_every_caller(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    config = {"dtype": "float32", "max_num_seqs": 8, "max_model_len": 256}
    values = {"model": str(tiny_model), "engine_process": "inline", "vllm_config": config, "batch_size": 8}
    async with running(Settings.model_validate(values)) as service:
        with monkeypatch.context() as patch:
            fault(service, patch)
            bodies: list[dict[str, Any]] = [{"prompt_token_ids": [number, POISON]} for number in range(20)]
            begun = time.monotonic()
            status, answer = await service.post("/batch", {"requests": bodies})
            assert time.monotonic() - begun < 2
        assert status == 200
        assert {row["error"]["code"] for row in answer["results"]} == {"engine_dead"}
        for route in ("/readyz", "/health"):
            assert (await service.client.get(route)).status_code == 503
        status, answer = await service.post("/generate", {"prompt": "Hi"})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        assert (await service.client.get("/livez")).status_code == 200
        assert service.service.lifecycle.exit_code == 70


@pytest.mark.usefixtures("no_engine")
async def test_an_engine_smaller_than_a_window_queues_within_it_and_warns(tiny_model: Path) -> None:
    async with opened(tiny_model) as backend:
        (warning,) = backend.info()["warnings"]
        assert "max_num_seqs is 8, below batch_size 32" in warning
        outcomes = await backend.generate(await window_of(backend, [HELLO] * 20))
        assert len(set(texts(outcomes))) == 1
        waits = [outcome.result.stats for outcome in outcomes if isinstance(outcome.result, Generation)]
        queued = [stats.scheduled - stats.queued for stats in waits if stats is not None]
        assert min(queued[16:]) > max(queued[:8])


@pytest.mark.usefixtures("no_engine")
async def test_without_statistics_the_start_fails(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should vLLM leave them out in spite of all, the probe finds it."""
    import vllm

    generate = vllm.LLM.generate

    def bare(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        for output in outputs:
            output.metrics = None
        return outputs

    async with opened(tiny_model) as backend:
        with monkeypatch.context() as patch:
            patch.setattr(vllm.LLM, "generate", bare)
            with pytest.raises(StartError, match="statistics"):
                await backend.validate()
        await backend.validate()
