"""The window rule: pure functions of (waiting, limits, clock)."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from app.request import Release, Request


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """When a window goes.

    Attributes:
        batch_size: most requests in one window.
        max_wait_s: longest wait of its oldest request, in seconds since admission.
    """

    batch_size: int
    max_wait_s: float


def release(
    waiting: int, oldest_admitted: float, limits: WindowLimits, now: float, *, is_draining: bool
) -> Release | None:
    """Why the open window goes now; None when it waits on.

    Args:
        waiting: requests that wait, at least one.
        oldest_admitted: when the oldest of them was admitted, in monotonic seconds.
        limits: the window's limits.
        now: monotonic seconds.
        is_draining: whether the service drains.
    """
    if waiting >= limits.batch_size:
        return "full"
    if is_draining:
        return "drain"
    return "max_wait" if now >= oldest_admitted + limits.max_wait_s else None


def members(waiting: Sequence[Request] | Iterable[Request], batch_size: int) -> list[Request]:
    """Who goes: by (priority, age), ``batch_size`` at most; the oldest always, so that none starves.

    Args:
        waiting: requests in the order of their admission, at least one.
        batch_size: how many may go.
    """
    in_order = list(waiting)
    if all(request.priority == in_order[0].priority for request in in_order):
        return list(islice(in_order, batch_size))
    ranked = heapq.nsmallest(batch_size, enumerate(in_order), key=lambda item: (item[1].priority, item[0]))
    chosen = [request for _, request in ranked]
    return chosen if in_order[0] in chosen else [*chosen[:-1], in_order[0]]
