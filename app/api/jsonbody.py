"""Bodies: read within bounds, decoded as strict JSON, without holding the event loop.

A large body is decoded on another thread. That alone is not enough, since C code that decodes 30 MB holds
the interpreter for a second: beyond ``PATIENT_BYTES`` the standard library's decoder in Python is used, in
which other threads get their turn, with runs of integers handed to the C one piece by piece.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from json import decoder as stdlib_decoder
from json import scanner
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from app.errors import InvalidRequest, RequestTooLarge

T = TypeVar("T")

ON_LOOP_BYTES = 64 << 10
"""Decoding and validating so much takes a few milliseconds at most."""
PATIENT_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 20
"""Objects and arrays in one body: each costs memory and time of the garbage collector."""
MAX_MEMBERS = 1 << 16
"""Members of one object: a dictionary of millions is built and freed in one go."""
DISCARD_FACTOR = 4
"""How many times the limit is read and thrown away, so that the caller gets to see the 413."""
DISCARD_S = 10.0

_json_array = stdlib_decoder.JSONArray  # type: ignore[attr-defined]
_json_object = stdlib_decoder.JSONObject  # type: ignore[attr-defined]
_INTEGERS = re.compile(r"(?:[ \t\n\r]{0,8}-?(?:0|[1-9][0-9]{0,17})[ \t\n\r]{0,8},){64,8192}")
_CLOSES = re.compile(r"[ \t\n\r]*[\],]")
_SURROGATE = re.compile("[\ud800-\udfff]")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        RequestTooLarge: more than ``max_bytes``.
        InvalidRequest: it is compressed.
        ClientDisconnect: the caller has gone.
    """
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise InvalidRequest(f"content-encoding {encoding!r} is not taken: send the body as it is")
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        chunk, more = await _receive(request)
        size += len(chunk)
        if size > max_bytes:
            if more:
                await _discard(request, max_bytes * DISCARD_FACTOR)
            raise RequestTooLarge(f"the body is larger than {max_bytes} bytes", limit=max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def _receive(request: Request) -> tuple[bytes, bool]:
    """The next piece of the body, and whether more will come.

    Raises:
        ClientDisconnect: the caller has gone.
    """
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


async def _discard(request: Request, max_bytes: int) -> None:
    """Read on without keeping: a connection closed in the middle of a body loses the answer."""
    size, more = 0, True
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(DISCARD_S):
            while more and size < max_bytes:
                chunk, more = await _receive(request)
                size += len(chunk)


class Parser:
    """Decodes and converts bodies: small ones on the event loop, others on one of two threads.

    One thread for each of two sizes: what is decoded patiently may take seconds and must not keep others waiting,
    and two threads that compute at the same time would keep the event loop from the interpreter.
    """

    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(1, thread_name_prefix="parse-medium")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="parse-large")

    async def parse(self, body: bytes, convert: Callable[[Any], T]) -> T:
        """What ``convert`` makes of the decoded body.

        Raises:
            InvalidRequest: not strict JSON, or what ``convert`` raises.
        """
        if len(body) <= ON_LOOP_BYTES:
            return convert(decode(body))
        executor = self._large if len(body) > PATIENT_BYTES else self._medium
        return await asyncio.get_running_loop().run_in_executor(executor, lambda: convert(decode(body)))

    def close(self) -> None:
        """End the threads without waiting for them."""
        for executor in (self._medium, self._large):
            executor.shutdown(wait=False, cancel_futures=True)


def decode(body: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, no lone surrogates, no deeper than ``MAX_DEPTH``.

    Raises:
        InvalidRequest: says what is wrong and where.
    """
    if not body.strip(b" \t\r\n"):
        raise InvalidRequest("the body is empty; a JSON object is expected")
    try:
        text = body.decode("utf-8")
        decoder = _PatientDecoder() if len(body) > PATIENT_BYTES else _DECODER
        value = decoder.decode(text)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    _check(value, text)
    return value


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"objects and arrays are nested deeper than {MAX_DEPTH}")


def _check(value: Any, text: str) -> None:
    """Depth and lone surrogates, looked for only where the text can hold them."""
    may_be_deep = text.count("[", 0, PATIENT_BYTES) + text.count("{", 0, PATIENT_BYTES) > MAX_DEPTH
    may_have_surrogates = "\\ud" in text or "\\uD" in text
    if not may_be_deep and not may_have_surrogates:
        return
    level, depth = [value], 0
    while level:
        if depth >= MAX_DEPTH and any(isinstance(node, list | dict) for node in level):
            raise _too_deep()
        level, depth = [item for node in level for item in _children(node)], depth + 1


def _children(node: Any) -> list[Any]:
    """What a node holds; a string or key with a lone surrogate is refused on the way."""
    if isinstance(node, str):
        if _SURROGATE.search(node):
            raise InvalidRequest("the body holds a lone surrogate (half of a \\u pair)")
        return []
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, list):
        return [item for item in node if not isinstance(item, int | float)]
    return []


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _ascii(convert: Callable[[str], T]) -> Callable[[str], T]:
    """The decoder in Python takes digits of every script for numbers; JSON has ten of them."""

    def converted(digits: str) -> T:
        if not digits.isascii():
            raise ValueError(f"{digits!r:.40} is not a JSON number")
        return convert(digits)

    return converted


class _CountedKeys(dict[str, str]):
    """What ``JSONObject`` asks for each key of one object: the shared copy of it. Counts them."""

    def __init__(self, shared: dict[str, str]) -> None:
        super().__init__()
        self._shared = shared
        self._members = 0

    def setdefault(self, key: str, default: str = "") -> str:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise InvalidRequest(f"an object has more than {MAX_MEMBERS} members")
        return self._shared.setdefault(key, default)


class _PatientDecoder(json.JSONDecoder):
    """The standard library's decoder in Python, bounded in depth and in objects; used once."""

    def __init__(self) -> None:
        super().__init__(parse_constant=_refuse_constant, parse_int=_ascii(int), parse_float=_ascii(float))
        self._depth = 0
        self._containers = 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _enter(self) -> None:
        self._depth += 1
        self._containers += 1
        if self._depth > MAX_DEPTH:
            raise _too_deep()
        if self._containers > MAX_CONTAINERS:
            raise InvalidRequest(f"the body holds more than {MAX_CONTAINERS} objects and arrays")

    def _object(self, *args: Any) -> Any:
        self._enter()
        *head, memo = args
        result = _json_object(*head, _CountedKeys(memo))
        self._depth -= 1
        return result

    def _array(self, text_and_start: tuple[str, int], scan_once: Any) -> tuple[list[Any], int]:
        self._enter()
        text, start = text_and_start
        values: list[Any] = []
        while (run := _INTEGERS.match(text, start)) is not None:
            values += json.loads(f"[{run[0][:-1]}]")
            start = run.end()
        if values and _CLOSES.match(text, start):
            raise json.JSONDecodeError("Expecting value", text, start)
        rest, end = _json_array((text, start), scan_once)
        self._depth -= 1
        if not values:
            return rest, end
        values.extend(rest)
        return values, end
