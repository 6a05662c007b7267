"""A request whose grammar is too slow to follow ends, and its neighbours go on.

The trial before admission sees some texts of a grammar, not all: an ambiguous rule may stand behind a branch that it
does not take. In the engine each further token then costs more, and all requests of the window wait for it.
"""

import functools
from collections.abc import Callable
from typing import Any

from app import timings

MAX_S = 1.0
MAX_PER_TOKEN_S = 0.01
"""What the engine may spend on one grammar, in seconds: so much, and so much for each token. Ordinary ones take a tenth
of a millisecond a token."""
SPENT = "_batchserve_spent_s"


def install() -> None:
    """Bound vLLM's grammars of xgrammar in this process; harmless when that has been done."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    if hasattr(XgrammarGrammar, SPENT):
        return
    setattr(XgrammarGrammar, SPENT, 0.0)
    XgrammarGrammar.fill_bitmask = _timed(XgrammarGrammar.fill_bitmask)
    XgrammarGrammar.accept_tokens = _bounded(_timed(XgrammarGrammar.accept_tokens))


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose time is added up for each grammar."""

    @functools.wraps(method)
    def timed(self: Any, *arguments: Any) -> Any:
        begun = timings.now()
        result = method(self, *arguments)
        setattr(self, SPENT, getattr(self, SPENT) + timings.elapsed(begun))
        return result

    return timed


def _bounded(accept_tokens: Callable[..., bool]) -> Callable[..., bool]:
    """The method, which takes no further token once too much is spent: vLLM then ends this one request."""

    @functools.wraps(accept_tokens)
    def bounded(self: Any, *arguments: Any) -> bool:
        is_accepted = accept_tokens(self, *arguments)
        return is_accepted and getattr(self, SPENT) <= MAX_S + MAX_PER_TOKEN_S * self.num_processed_tokens

    return bounded
