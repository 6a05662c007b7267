"""One failing request costs its neighbours nothing: find the culprits of a window that raised."""

import copy
import logging
from collections.abc import Callable

from app import timings
from app.errors import EngineDead, GenerationFailed, InvalidRequest
from app.request import Generation, Outcome, Window

logger = logging.getLogger(__name__)


class WindowMismatch(Exception):
    """The engine gave back other outputs than the window asked for: none of them may be handed out."""


def run_isolated(
    window: Window, run: Callable[[Window], list[Generation | Exception]], recover: Callable[[], None]
) -> list[Outcome]:
    """Run a window; should it raise, run its halves until each culprit stands alone.

    Args:
        window: the requests to run.
        run: one engine call; a result for each request, in order. May raise for all of them.
        recover: makes the engine empty again after ``run`` has raised. Raises ``EngineDead`` when it cannot.

    Returns:
        An outcome for each request, each with the window of the run that gave it.

    Raises:
        EngineDead: from ``run`` or ``recover``; nothing is run again on a dead engine.
    """
    try:
        results = run(window)
    except EngineDead:
        raise
    except Exception as error:
        logger.warning("window %d of %d failed: %s: %s", window.id, len(window.requests), type(error).__name__, error)
        return run_again(window, error, run, recover)
    return [
        Outcome(request, window, position, result)
        for position, (request, result) in enumerate(zip(window.requests, results, strict=True))
    ]


def run_again(
    window: Window,
    error: Exception,
    run: Callable[[Window], list[Generation | Exception]],
    recover: Callable[[], None],
) -> list[Outcome]:
    """As ``run_isolated``, for a window that has raised ``error`` already."""
    recover()
    if isinstance(error, WindowMismatch) or len(window.requests) == 1:
        failure = error if isinstance(error, InvalidRequest) else GenerationFailed(f"the engine failed: {error}")
        return [Outcome(request, window, at, copy.copy(failure)) for at, request in enumerate(window.requests)]
    outcomes: list[Outcome] = []
    for half in window.split():
        half.dispatched = timings.now()
        outcomes += run_isolated(half, run, recover)
    return outcomes
