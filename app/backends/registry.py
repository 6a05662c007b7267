"""The contract of a backend, and the registry of those there are."""

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from app.backends.args import BackendArgs
from app.backends.thread import EngineThread
from app.errors import ContextLengthExceeded, EngineDead, InvalidRequest, ModelNotFound, ServiceError
from app.prompts.openai import OpenAIPrompt, Work
from app.request import Answer, AnswerHead, Outcome, Release, Request, Resolved, ServedModel, Window

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Backend(ABC):
    """Turns bodies into requests (``resolve``), windows into outcomes (``generate``), OpenAI's answers (``shape``).

    ``_open``, ``_run`` and ``_close`` are called on the engine thread, one at a time, and on no
    other; ``_resolve`` and ``_shape`` on a thread of their own each. All other methods belong to the event loop.

    Attributes:
        takes_windows: whether one window at a time goes through the engine. Else each request is a window of its own,
            as many at once as ``has_room`` says, and its outputs are told to its listener as they come (``stream``).
        release: why a request that is a window of its own goes.
    """

    takes_windows: bool = True
    release: Release = "direct"
    registry: "ClassVar[dict[str, type[Backend]]]" = {}  # noqa: RUF012 -- quoted: the class is not there yet

    @classmethod
    def register(cls, kind: str) -> "Callable[[type[Backend]], type[Backend]]":
        """Class decorator: make a backend known under ``kind``."""

        def add(backend: "type[Backend]") -> "type[Backend]":
            cls.registry[kind] = backend
            return backend

        return add

    @classmethod
    def create(cls, args: BackendArgs) -> "Backend":
        """A new backend of ``args.kind``, not opened yet.

        Raises:
            ValueError: the kind is not registered; the message names those that are.
        """
        if args.kind not in cls.registry:
            raise ValueError(f"backend {args.kind!r} is unknown; there are {', '.join(sorted(cls.registry))}")
        return cls.registry[args.kind](args)

    def __init__(self, args: BackendArgs) -> None:
        self.args = args
        self.death: asyncio.Future[str] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = EngineThread("engine", on_death=self._report_death, advance=self._advance)
        self._resolver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resolve")
        self._shaper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shape")
        self._is_open = False
        self._is_closing = False

    async def open(self) -> None:
        """Build the engine on the engine thread.

        From here on ``death`` is a future that gets the reason when the engine dies.

        Raises:
            StartError: with a line that says what to change.
        """
        self._loop = asyncio.get_running_loop()
        self.death = self._loop.create_future()
        self._thread.start()
        await self._thread.call(self._open)
        self._is_open = True

    async def validate(self) -> None:
        """Prove the engine with a generation that must come back with statistics.

        Raises:
            StartError: it did not.
            EngineDead: the engine thread has ended.
            RuntimeError: the backend is not open.
        """
        if not self._is_open or self.death is None:
            raise RuntimeError("open the backend first")
        proof = asyncio.ensure_future(self._prove())
        await asyncio.wait((proof, self.death), return_when=asyncio.FIRST_COMPLETED)
        if not proof.done():
            proof.cancel()
            raise EngineDead(self.death.result())
        proof.result()

    async def resolve(self, bodies: Sequence[Work]) -> list[Resolved | ServiceError]:
        """Turn bodies into what the engine takes, off the event loop; a wrong one gives its error."""
        return await self._on(self._resolver, self._resolve_all, bodies)

    async def shape(self, answers: Sequence[Answer], head: AnswerHead) -> dict[str, Any]:
        """OpenAI's answer to a body, from the answers to its prompts, as plain JSON values; off the event loop.

        Raises:
            GenerationFailed: no answer could be made of them.
        """
        return await self._on(self._shaper, self._shape, answers, head)

    @staticmethod
    async def _on(executor: ThreadPoolExecutor, work: Callable[..., T], *arguments: Any) -> T:
        run = contextvars.copy_context().run  # so that its log lines carry the request's id
        return await asyncio.get_running_loop().run_in_executor(executor, run, work, *arguments)

    def stream(
        self, prompts: Sequence[Resolved], outputs: AsyncIterator[tuple[int, Any]], head: AnswerHead
    ) -> AsyncGenerator[bytes, None]:
        """OpenAI's answer in chunks, each the JSON of one event; on the event loop.

        Args:
            prompts: those of the body.
            outputs: what their listeners are told, each with the number of its prompt.
            head: what the answer begins with.

        Raises:
            ServiceError: what ``outputs`` raises.
            GenerationFailed: no answer could be made of them.
        """
        raise NotImplementedError("a backend that takes windows has nothing to stream")

    async def generate(self, window: Window) -> list[Outcome]:
        """Run a window on the engine thread: one outcome for each of its requests.

        Raises:
            EngineDead: the engine, or its thread, has died.
        """
        return await self._thread.call(self._run, window)

    async def close(self, timeout_s: float = 10.0) -> bool:
        """Close the engine on its thread and end the thread; True when it ended in time.

        May be called again, and on a backend that was never opened.
        """
        self._is_closing = True
        for executor in (self._resolver, self._shaper):
            executor.shutdown(wait=False, cancel_futures=True)
        closed = await self._thread.close(self._close, timeout_s)
        if not closed:
            self.kill()
        return closed

    def kill(self) -> None:  # noqa: B027 -- a backend without processes has nothing to kill
        """End what the engine has outside this process, at once. May be called from any thread."""

    def _report_death(self, reason: str) -> None:
        """Called from any thread: tell the event loop, once. A close is no death."""
        if self._is_closing or self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._die, reason)

    def _die(self, reason: str) -> None:
        if self.death is not None and not self.death.done():
            logger.error("the engine is dead: %s", reason)
            self.death.set_result(reason)

    def _resolve_all(self, bodies: Sequence[Work]) -> list[Resolved | ServiceError]:
        return [self._resolve_one(body) for body in bodies]

    def _resolve_one(self, body: Work) -> Resolved | ServiceError:
        """One body; whatever goes wrong is an error of this one alone."""
        try:
            self._check_model(body)
            return self._resolve(body)
        except Exception as error:
            return self._refusal(body, error)

    def _check_model(self, body: Work) -> None:
        if body.model is not None:
            self.find_model(body.model, param="model")

    def find_model(self, name: str, *, param: str | None = None) -> ServedModel:
        """The model of this name.

        Raises:
            ModelNotFound: there is none, or it cannot be used; ``param`` is the field that asks for it.
        """
        models = self.models()
        if (found := next((model for model in models if model.name == name), None)) is not None:
            return found
        names = ", ".join(repr(model.name) for model in models)
        raise ModelNotFound(f"model {name!r} is not served here; this service has {names}", param=param)

    def models(self) -> list[ServedModel]:
        """What a request may name as its ``model``; the first is the one when it names none."""
        return [ServedModel(self.args.served_model_name, self.args.model)]

    @staticmethod
    def _refusal(body: Work, error: Exception) -> ServiceError:
        """The error that a body gets for what went wrong while it was resolved."""
        if not isinstance(error, ServiceError):
            logger.error("a request could not be resolved", exc_info=error)
            return InvalidRequest(f"the request cannot be resolved: {type(error).__name__}: {error}")
        if isinstance(error, ContextLengthExceeded) and isinstance(body, OpenAIPrompt):
            error.param = body.param  # which of a list of prompts
        return error

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Context length in tokens; known once open."""

    @property
    def max_in_flight(self) -> int:
        """Requests that are handed over at once, where the engine takes no windows; known once open."""
        return self.args.batch_size

    def has_room(self, request: Request, running_requests: int, running_places: int) -> bool:
        """Whether a request may be handed over beside those that have been, by their number and their places."""
        return running_requests < self.max_in_flight

    def _advance(self) -> bool:
        """Work on the engine thread between two calls; whether there is more of it."""
        return False

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What ``/info`` shows of the backend; no secrets."""

    @abstractmethod
    def _open(self) -> None:
        """Build the engine; on the engine thread."""

    @abstractmethod
    async def _prove(self) -> None:
        """Generate a token or two and check that statistics come with them."""

    @abstractmethod
    def _resolve(self, body: Work) -> Resolved:
        """Turn one body into what the engine takes, or raise a ``ServiceError``; on the resolver's thread."""

    @abstractmethod
    def _shape(self, answers: Sequence[Answer], head: AnswerHead) -> dict[str, Any]:
        """OpenAI's answer without ``metrics``; on the shaper's thread."""

    def _run(self, window: Window) -> list[Outcome]:
        """One outcome for each request of the window; on the engine thread. Not there without windows."""
        raise NotImplementedError

    @abstractmethod
    def _close(self) -> None:
        """Close the engine; on the engine thread; harmless when there is none."""
