"""The outputs of one body's requests as they come, for an answer that is streamed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from app.request import Answer


class Live:
    """Told by a backend of each part of an output, on the event loop; tells the one who streams them.

    Args:
        prompts: how many there are.

    Attributes:
        is_last: whether no output will come behind those that were handed on.
    """

    def __init__(self, prompts: int) -> None:
        self.is_last = False
        self._unfinished = prompts
        self._told: asyncio.Queue[tuple[int, Any, bool] | asyncio.Future[Answer]] = asyncio.Queue()

    def listener(self, index: int) -> Callable[[Any, bool], None]:
        """What to tell the outputs of the prompt of this number, and whether each is its last."""
        return partial(self._tell, index)

    def _tell(self, index: int, output: Any, is_last: bool) -> None:
        self._told.put_nowait((index, output, is_last))

    async def outputs(self, futures: "Sequence[asyncio.Future[Answer]]") -> AsyncIterator[tuple[int, Any]]:
        """Each output with the number of its prompt, until all of the futures are done.

        Raises:
            ServiceError: what one of them failed with.
        """
        left = len(futures)
        for future in futures:
            future.add_done_callback(self._told.put_nowait)
        while left:
            told = await self._told.get()
            if isinstance(told, asyncio.Future):
                told.result()
                left -= 1
                continue
            index, output, is_last = told
            self._unfinished -= is_last
            self.is_last = self._unfinished == 0
            yield index, output
