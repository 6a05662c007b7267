"""The contract that every backend keeps, shown with a small one."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from app.backends.args import BackendArgs, parse_args
from app.backends.fake import FakeBackend
from app.backends.registry import Backend
from app.errors import EngineDead, InvalidRequest, ModelNotFound, ServiceError, StartError
from app.prompts.openai import Work
from app.prompts.spec import GenerateRequest
from app.request import Answer, AnswerHead, Outcome, Resolved, Window
from tests.backends.test_isolation import make_window
from tests.batching.doubles import outcomes, within

BOUND_S = 5.0
ARGS = BackendArgs(kind="small", model="m", served_model_name="m")


class SmallBackend(Backend):
    """Notes which thread each of its parts is called on."""

    def __init__(self, args: BackendArgs) -> None:
        super().__init__(args)
        self.threads: dict[str, set[str]] = {}
        self.kills = 0

    def note(self, part: str) -> None:
        self.threads.setdefault(part, set()).add(threading.current_thread().name)

    @property
    def max_model_len(self) -> int:
        return 16

    def info(self) -> dict[str, Any]:
        return {}

    def _open(self) -> None:
        self.note("open")

    async def _prove(self) -> None:
        await self._thread.call(self.note, "probe")

    def _resolve(self, body: Work) -> Resolved:
        assert isinstance(body, GenerateRequest)
        self.note("resolve")
        if body.prompt == "wrong":
            raise InvalidRequest("wrong", param="prompt")
        if body.prompt == "bug":
            raise KeyError("bug")
        return Resolved([1], None, {"label": body.prompt})

    def _shape(self, answers: Sequence[Answer], head: AnswerHead) -> dict[str, Any]:
        self.note("shape")
        return {"id": head.id}

    def _run(self, window: Window) -> list[Outcome]:
        self.note("run")
        return outcomes(window)

    def _close(self) -> None:
        self.note("close")

    def kill(self) -> None:
        self.kills += 1


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "registry", dict(Backend.registry))


@pytest.fixture
async def backend() -> AsyncIterator[SmallBackend]:
    backend = SmallBackend(ARGS)
    await backend.open()
    yield backend
    await backend.close(BOUND_S)


def body(prompt: str = "x", **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, **fields)


# --- choosing one ---


def test_a_registered_backend_is_made_by_its_kind(own_registry: None) -> None:
    assert Backend.register("small")(SmallBackend) is SmallBackend
    made = Backend.create(ARGS)

    assert isinstance(made, SmallBackend)
    assert made.args is ARGS


def test_the_fake_is_registered_when_its_module_is_imported() -> None:
    args = parse_args({"kind": "fake", "model": "m", "served_model_name": "m"})

    assert isinstance(Backend.create(args), FakeBackend)


def test_an_unknown_kind_names_those_there_are(own_registry: None) -> None:
    Backend.registry.clear()
    Backend.register("one")(SmallBackend)
    Backend.register("another")(SmallBackend)

    with pytest.raises((ValueError, StartError), match="'small' is unknown; there are another, one"):
        Backend.create(ARGS)


# --- threads ---


async def test_the_engines_parts_run_on_one_thread_and_resolving_on_another(backend: SmallBackend) -> None:
    await backend.validate()
    await asyncio.gather(*(backend.generate(make_window(2)) for _ in range(50)))
    await asyncio.gather(*(backend.resolve([body()]) for _ in range(50)))
    await backend.close(BOUND_S)

    assert backend.threads["open"] == backend.threads["probe"] == backend.threads["run"] == backend.threads["close"]
    assert backend.threads["run"] == {"engine"}
    assert len(backend.threads["resolve"]) == 1
    assert not backend.threads["resolve"] & {"engine", "MainThread"}


# --- resolving ---


async def test_a_wrong_body_gives_its_error_and_harms_no_other(backend: SmallBackend) -> None:
    first, wrong, bug, last = await backend.resolve([body("a"), body("wrong"), body("bug"), body("b")])

    assert isinstance(first, Resolved)
    assert isinstance(last, Resolved)
    assert isinstance(wrong, InvalidRequest)
    assert isinstance(bug, ServiceError)


async def test_another_model_is_not_found_and_the_served_one_is(backend: SmallBackend) -> None:
    found, other = await backend.resolve([body(model="m"), body(model="gpt-4")])

    assert isinstance(found, Resolved)
    assert isinstance(other, ModelNotFound)
    assert other.param == "model"
    assert "'gpt-4'" in other.message
    assert "'m'" in other.message


# --- opening and closing ---


async def test_validating_before_opening_is_refused() -> None:
    with pytest.raises(RuntimeError):
        await SmallBackend(ARGS).validate()


async def test_a_failing_open_reaches_the_caller_and_the_backend_can_be_closed() -> None:
    backend = SmallBackend(ARGS)

    def fail() -> None:
        raise StartError("no such model")

    backend._open = fail  # type: ignore[method-assign]
    with pytest.raises(StartError, match="no such model"):
        await backend.open()
    with pytest.raises(RuntimeError):
        await backend.validate()

    assert await backend.close(BOUND_S) is True


async def test_a_close_may_be_repeated_and_is_no_death(backend: SmallBackend) -> None:
    assert await backend.close(BOUND_S) is True
    assert await backend.close(BOUND_S) is True
    await asyncio.sleep(0)

    assert backend.death is not None
    assert not backend.death.done()
    assert backend.kills == 0


async def test_a_backend_that_was_never_opened_is_closed_in_no_time() -> None:
    assert await SmallBackend(ARGS).close(BOUND_S) is True


async def test_what_does_not_close_in_time_is_killed(backend: SmallBackend) -> None:
    go_on = threading.Event()
    backend._close = lambda: go_on.wait(BOUND_S)  # type: ignore[assignment,method-assign]

    assert await backend.close(0.05) is False
    assert backend.kills == 1
    go_on.set()


async def test_start_close_start_in_one_process() -> None:
    for _ in range(3):
        backend = SmallBackend(ARGS)
        await backend.open()
        assert len(await backend.generate(make_window(2))) == 2
        assert await backend.close(BOUND_S) is True


# --- death ---


async def test_a_call_that_ends_the_thread_is_the_engines_death(backend: SmallBackend) -> None:
    def die(window: Window) -> list[Outcome]:
        raise SystemExit("out")

    backend._run = die  # type: ignore[method-assign]
    with pytest.raises(EngineDead):
        await within(backend.generate(make_window(2)))

    assert backend.death is not None
    assert "SystemExit" in await asyncio.wait_for(backend.death, BOUND_S)
    with pytest.raises((EngineDead, RuntimeError)):
        await within(backend.validate())


async def test_a_death_is_told_once(backend: SmallBackend) -> None:
    threads = [threading.Thread(target=backend._report_death, args=(f"reason {n}",)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert backend.death is not None
    assert (await asyncio.wait_for(backend.death, BOUND_S)).startswith("reason ")
    await asyncio.sleep(0.01)


async def test_a_death_during_a_close_is_part_of_the_close(backend: SmallBackend) -> None:
    await backend.close(BOUND_S)
    backend._report_death("the child has ended")
    await asyncio.sleep(0)

    assert backend.death is not None
    assert not backend.death.done()
