"""What a comparison has generated: the same requests for every side, of fixed lengths, so that all do the same work."""

import random
from collections.abc import Iterator
from typing import Any

PROMPT_WORDS = (4, 8, 16, 32, 64, 96)
"""Below 128 tokens, the block of vLLM's prefix cache on a CPU: no repeat is served from it."""
MAX_TOKENS = (8, 16, 24, 32, 48, 64)
_WORDS = ("river", "stone", "number", "seven", "light", "green", "morning", "paper", "early", "window", "long", "road")

Request = dict[str, Any]


def mixed(count: int, seed: int = 0) -> list[Request]:
    """``/generate`` bodies of mixed length, each with another prompt; greedy, and to their last token."""
    draw = random.Random(seed)
    return [
        {
            "prompt": " ".join([f"{number}:", *draw.choices(_WORDS, k=draw.choice(PROMPT_WORDS))]),
            "max_tokens": draw.choice(MAX_TOKENS),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def alone() -> Request:
    """The request of a single caller: 16 tokens."""
    return {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}


def windows_of(requests: list[Request], size: int) -> Iterator[list[Request]]:
    """The requests in consecutive windows."""
    for start in range(0, len(requests), size):
        yield requests[start : start + size]


def tokens_of(requests: list[Request]) -> int:
    """How many tokens all of them generate."""
    return sum(request["max_tokens"] for request in requests)
