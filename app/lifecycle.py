"""Where the service stands between its start and its end, and with which code the process exits."""

import asyncio
from enum import Enum

from app.errors import EngineDead, NotReady, ShuttingDown, Unavailable
from app.request import Call

EXIT_OK = 0
EXIT_FAILED_START = 1
EXIT_WORK_CUT = 1
EXIT_ENGINE_DEAD = 70
"""EX_SOFTWARE of sysexits.h: a supervisor starts the service again."""


class State(Enum):
    """The service's states, in the order in which it passes them."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"
    FAILED = "failed"


class Lifecycle:
    """One state with its reason; moves forward only.

    Attributes:
        state: where the service stands.
        reason: a sentence about it, for ``/readyz`` and for the errors that callers get.
        exit_code: what the process ends with.
        has_loaded: set once a generation has succeeded.
        answers_owed: calls whose work was accepted and whose answer has not left yet.
        has_drained: all accepted work has been answered, or cut.
        is_over: set when the process should end.
    """

    def __init__(self) -> None:
        self.state = State.LOADING
        self.reason = "the model is loading"
        self.exit_code = EXIT_OK
        self.has_loaded = asyncio.Event()
        self.answers_owed = 0
        self.has_drained = False
        self._has_answered = asyncio.Event()
        self._has_answered.set()
        self.is_over = asyncio.Event()

    @property
    def is_ending(self) -> bool:
        """Whether no work will be taken any more."""
        return self.state not in (State.LOADING, State.READY)

    def ready(self) -> None:
        """A generation has succeeded."""
        if self.state is State.LOADING:
            self.state, self.reason = State.READY, "ready"
            self.has_loaded.set()

    def drain(self) -> None:
        """A stop was asked for."""
        if self.state in (State.LOADING, State.READY):
            self.state, self.reason = State.DRAINING, "the service is shutting down"

    def cut_short(self) -> None:
        """The stop could not wait for all accepted work."""
        if self.exit_code == EXIT_OK:
            self.exit_code = EXIT_WORK_CUT

    def fail(self, reason: str) -> None:
        """The start has failed; ``reason`` says what to change."""
        if self.state in (State.LOADING, State.DRAINING):
            self.state, self.reason, self.exit_code = State.FAILED, reason, EXIT_FAILED_START
        self.is_over.set()

    def die(self, reason: str) -> None:
        """The engine is dead."""
        if self.state is not State.FAILED:
            self.state, self.reason, self.exit_code = State.DEAD, reason, EXIT_ENGINE_DEAD

    def owe(self, call: Call) -> None:
        """Work of this call was accepted."""
        call.is_accepted = True
        self.answers_owed += 1
        self._has_answered.clear()

    def call_ended(self, call: Call) -> None:
        """The call's answer has left, or its caller has."""
        if call.is_accepted:
            self.answers_owed -= 1
            if not self.answers_owed:
                self._has_answered.set()

    async def all_answered(self) -> None:
        """Until no answer is owed."""
        await self._has_answered.wait()

    def refusal(self) -> Unavailable | None:
        """The error that new work gets now; None while it is taken."""
        if self.state is State.READY:
            return None
        kinds = {State.DRAINING: ShuttingDown, State.DEAD: EngineDead}
        return kinds.get(self.state, NotReady)(self.reason)
