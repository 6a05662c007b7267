"""Bodies: strict JSON whatever the size, and nobody held up while a large one is decoded."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request

from app.api import jsonbody
from app.api.jsonbody import Parser, decode, read_body
from app.errors import InvalidRequest, RequestTooLarge

LARGE_BYTES = (1 << 20) + 1
HELD_AT_MOST_S = 2.5
"""Ten times what is wanted: a slow machine with other work must not fail the test."""


def decode_large(body: bytes) -> Any:
    """The same value from a body so large that the patient decoder takes it."""
    return decode(body + b" " * LARGE_BYTES)


def decode_patiently(body: bytes) -> Any:
    """The patient decoder on a small body."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonbody, "PATIENT_BYTES", 0)
        return decode(body)


def outcome(decoder: Callable[[bytes], Any], body: bytes) -> Any:
    """The value, or None in place of a refusal (as text, so that 1, 1.0 and True differ)."""
    try:
        return repr(decoder(body))
    except InvalidRequest:
        return None


both_sizes = pytest.mark.parametrize("decoder", [decode, decode_large], ids=["small", "large"])


# --- what is taken ---


@both_sizes
@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b"{}", {}),
        (b' \n\t{"a" : [1, -2.5e3, true, false, null, "x"]}\r\n', {"a": [1, -2500.0, True, False, None, "x"]}),
        ('{"ü":"日本語 😀"}'.encode(), {"ü": "日本語 😀"}),
        (rb'{"a":"\ud83d\ude00 \u00fc \\ud800"}', {"a": "😀 ü \\ud800"}),
        (b'{"a":1,"a":2}', {"a": 2}),
        (b'{"a":"\x7f"}', {"a": "\x7f"}),
        (b"[" + b"7," * 200 + b"7]", [7] * 201),
        (b"[" + b"7 ,\n " * 200 + b'"end"]', [*[7] * 200, "end"]),
        (b"[" + b"7," * 100 + b"1.5," + b"8," * 100 + b"[]]", [*[7] * 100, 1.5, *[8] * 100, []]),
        (b"[" + b"9" * 4300 + b"]", [int("9" * 4300)]),
        (b"[" * 64 + b"]" * 64, None),
        (b'{"a":' * 64 + b"1" + b"}" * 64, None),
        (b"[" * 63 + b'{"a":"x"}' + b"]" * 63, None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_strict_json_of_any_size_is_taken(decoder: Callable[[bytes], Any], body: bytes, value: Any) -> None:
    decoded = decoder(body)

    assert decoded == (json.loads(body) if value is None else value)


# --- what is refused ---

BAD = {
    "empty": b"",
    "only spaces": b" \r\n\t ",
    "not JSON": b"hello",
    "a second value": b"{} {}",
    "cut short": b'{"a": [1, 2',
    "single quotes": b"{'a': 1}",
    "a comment": b'{"a": 1} // one',
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "invalid UTF-8": b'{"a": "\xff"}',
    "overlong UTF-8": b'{"a": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"a": "\xed\xa0\x80"}',
    "a lone high surrogate": rb'{"a": "\ud800"}',
    "a lone low surrogate": rb'{"a": "x\uDC00y"}',
    "surrogates the wrong way round": rb'{"a": "\udc00\ud800"}',
    "a lone surrogate in a key": rb'{"a": {"\ud800": 1}}',
    "a lone surrogate deep inside": rb'{"a": [[{"b": ["\ud800"]}]]}',
    "a lone surrogate as the whole": rb'"\ud800"',
    "NaN": b'{"a": NaN}',
    "Infinity": b'{"a": [Infinity]}',
    "minus Infinity": b'{"a": -Infinity}',
    "an integer of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "a leading zero": b'{"a": 01}',
    "a leading plus": b'{"a": +1}',
    "a bare point": b'{"a": .5}',
    "a number without an end": b'{"a": 1.}',
    "hexadecimal": b'{"a": 0x1}',
    "digits of another script": '{"a": 1٣}'.encode(),
    "a fraction of another script": '{"a": 1.٣}'.encode(),
    "an exponent of another script": '{"a": 1e٣}'.encode(),
    "a control character": b'{"a": "\n"}',
    "a wrong escape": rb'{"a": "\x41"}',
    "a comma too many in an array": b'{"a": [1,]}',
    "a comma too many in an object": b'{"a": 1,}',
    "a comma too many after many integers": b"[" + b"7," * 200 + b"]",
    "the same and a space": b"[" + b"7," * 200 + b" \n           ]",
    "two commas after many integers": b"[" + b"7," * 200 + b",7]",
    "two commas among many integers": b"[" + b"7," * 100 + b"," + b"7," * 100 + b"7]",
    "a leading zero among many integers": b"[" + b"7," * 100 + b"07," + b"7," * 100 + b"7]",
    "digits of another script among many integers": ("[" + "7," * 100 + "٣," + "7," * 100 + "7]").encode(),
    "many integers without an end": b"[" + b"7," * 200,
    "arrays nested 65 deep": b"[" * 65 + b"]" * 65,
    "arrays of numbers nested 65 deep": b"[" * 65 + b"1,2" + b"]" * 65,
    "objects nested 65 deep": b'{"a":' * 65 + b"1" + b"}" * 65,
    "empty objects nested 65 deep": b'{"a":' * 64 + b"{}" + b"}" * 64,
    "deep in the second half": b'{"a": 1, "b": ' + b"[" * 64 + b"]" * 64 + b"}",
    "nested beyond the stack": b"[" * 100_000 + b"]" * 100_000,
    "nested beyond the stack and without an end": b'{"a":' * 100_000,
}


@both_sizes
@pytest.mark.parametrize("name", BAD)
def test_what_is_not_strict_json_is_refused_with_a_reason(decoder: Callable[[bytes], Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoder(BAD[name])

    assert len(caught.value.message) > 10
    assert json.dumps(caught.value.body(), allow_nan=False)


@both_sizes
def test_a_refusal_says_where(decoder: Callable[[bytes], Any]) -> None:
    with pytest.raises(InvalidRequest, match="at character 6"):
        decoder(b'{"a": oops}')
    with pytest.raises(InvalidRequest, match="byte 7"):
        decoder(b'{"a": "\xff"}')


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            b"{" + b",".join(b'"%d":1' % n for n in range((1 << 16) + 1)) + b" " * LARGE_BYTES + b"}", id="keys"
        ),
        pytest.param(b"{" + b'"a":1,' * (1 << 18) + b'"a":1}', id="one key very often"),
    ],
)
def test_a_large_object_of_too_many_members_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than 65536 members"):
        decode(body)


def test_the_same_key_in_many_objects_is_no_large_object() -> None:
    body = b"[" + b'{"a":1},' * 100_000 + b"{}]" + b" " * LARGE_BYTES

    assert len(decode(body)) == 100_001


# --- the two decoders agree ---

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
values = st.recursive(
    scalars | st.lists(st.integers(-(10**20), 10**20), min_size=60, max_size=140),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
layouts = st.sampled_from([None, 0, 1, 3, 12])


at_leisure = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine with other work to do is no reason to fail."""


@at_leisure
@given(values, layouts, st.booleans())
def test_both_decoders_give_what_was_written(value: Any, indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()

    assert repr(decode(body)) == repr(decode_patiently(body)) == repr(json.loads(body))


@at_leisure
@given(values, st.data())
@example([7] * 100, None)
def test_both_decoders_take_and_refuse_the_same_damaged_texts(value: Any, data: st.DataObject | None) -> None:
    text = json.dumps(value)
    if data is not None:
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 3)))
        text = text[:start] + data.draw(st.text('0123 ,:[]{}"\\-+.eEnN٣\n', max_size=3)) + text[end:]
    body = text.encode()

    assert outcome(decode, body) == outcome(decode_patiently, body)


integers = st.sampled_from(["0", "-0", "7", "-12", "999999999999999999", "1" * 19, "00", "1e3", "1.0", "x", "", "٣"])
spaces = st.sampled_from(["", " ", "\n\t", " " * 8, " " * 9, " " * 20, "\xa0"])


@at_leisure
@given(st.integers(60, 140), integers, integers, spaces, spaces, st.sampled_from(["", ",", ",,", "]", ",[]"]))
def test_runs_of_integers_are_decoded_as_any_array(
    count: int, often: str, last: str, before: str, after: str, end: str
) -> None:
    body = ("[" + f"{before}{often}{after}," * count + last + end + "]").encode()

    assert outcome(decode_patiently, body) == outcome(decode, body)


def test_a_run_of_integers_longer_than_one_piece_is_whole() -> None:
    numbers = list(range(30_000))

    assert decode_large(json.dumps(numbers).encode()) == numbers


# --- nobody is held up ---


def fill(unit: bytes, size: int = 30 << 20) -> bytes:
    return unit * (size // len(unit))


AWKWARD: dict[str, Callable[[], bytes]] = {
    "ints": lambda: b"[" + fill(b"12345,") + b"1]",
    "text": lambda: b'{"prompt":"' + fill(b"x") + b'"}',
    "escapes": lambda: b'{"prompt":"' + fill(rb"\ud83d\ude00") + b'"}',
    "strings": lambda: b"[" + fill(b'"abcdefghijklmnopqrstuvwxyz",') + b'""]',
    "floats": lambda: b"[" + fill(b"0.12345678901234567,") + b"1.5]",
    "lists": lambda: b"[" + fill(b"[],") + b"[]]",
    "objects": lambda: b"[" + fill(b'{"a":1},') + b"{}]",
    "rows": lambda: (
        b"[" + fill(b'{"prompt":"hello, this is a prompt of a common length","max_tokens":5},', 10 << 20) + b"{}]"
    ),
    "deep": lambda: b"[" + fill(b"[" * 63 + b"]" * 63 + b",") + b"1]",
    "deeper": lambda: fill(b"["),
    "keys": lambda: b"{" + b",".join(b'"k%d":1' % number for number in range(2_400_000)) + b"}",
    "one number": lambda: b"[" + fill(b"9") + b"]",
    "spaces": lambda: b"[" + fill(b" ") + b"1]",
}


@pytest.fixture
def longest_hold() -> Iterator[Callable[[], float]]:
    """The longest time in seconds that this thread was not let run while others worked."""
    over = threading.Event()
    held = [0.0]

    def watch() -> None:
        last = time.perf_counter()
        while not over.is_set():
            time.sleep(0.001)
            moment = time.perf_counter()
            held[0] = max(held[0], moment - last)
            last = moment

    thread = threading.Thread(target=watch, name="watch")
    thread.start()
    yield lambda: held[0]
    over.set()
    thread.join()


@pytest.mark.parametrize("kind", AWKWARD)
def test_other_threads_get_their_turn_while_a_large_body_is_decoded(kind: str, request: pytest.FixtureRequest) -> None:
    body = AWKWARD[kind]()
    gc.collect()
    longest_hold: Callable[[], float] = request.getfixturevalue("longest_hold")
    started = time.perf_counter()
    taken = outcome_kind(body)
    took = time.perf_counter() - started

    if kind in ("lists", "objects", "deep"):
        assert "objects and arrays" in taken
    print(f"{kind}: {taken} after {took:.2f} s, others held for {longest_hold() * 1000:.0f} ms at most")
    assert longest_hold() < HELD_AT_MOST_S


def outcome_kind(body: bytes) -> str:
    try:
        return type(decode(body)).__name__
    except InvalidRequest as error:
        return f"refused ({error.message[:60]})"


# --- reading and where it is decoded ---


async def test_a_body_is_decoded_where_it_is_or_on_the_thread_of_its_size() -> None:
    def where(_: Any) -> int:
        return threading.get_ident()

    parser = Parser()
    small, medium, large = b"{}", b"{}" + b" " * jsonbody.ON_LOOP_BYTES, b"{}" + b" " * jsonbody.PATIENT_BYTES
    threads = [await parser.parse(body, where) for body in (small, medium, large)]
    with pytest.raises(InvalidRequest):
        await parser.parse(b"{" + medium, where)
    parser.close()

    assert threads[0] == threading.get_ident()
    assert len(set(threads)) == 3


def incoming(*chunks: bytes, headers: dict[str, str] | None = None, hangs_up: bool = False) -> Request:
    """A request whose body comes in ``chunks``."""
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    messages.append({"type": "http.disconnect"} if hangs_up else {"type": "http.request", "body": b""})
    replies = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(replies)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


async def test_a_body_comes_in_pieces() -> None:
    assert await read_body(incoming(b'{"a"', b":", b"1}"), 100) == b'{"a":1}'


async def test_a_body_of_just_the_limit_is_taken_and_one_byte_more_is_not() -> None:
    assert len(await read_body(incoming(b"x" * 60, b"x" * 40), 100)) == 100
    with pytest.raises(RequestTooLarge) as caught:
        await read_body(incoming(b"x" * 60, b"x" * 41), 100)
    assert caught.value.extra == {"limit": 100}


async def test_what_follows_an_oversized_body_is_read_and_thrown_away_within_bounds() -> None:
    sent: list[int] = []

    async def receive() -> dict[str, Any]:
        sent.append(50)
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 50, "more_body": True}

    endless = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)
    with pytest.raises(RequestTooLarge):
        await asyncio.wait_for(read_body(endless, 100), 5)

    assert sum(sent) <= 100 * (jsonbody.DISCARD_FACTOR + 2)


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    with pytest.raises(InvalidRequest, match="content-encoding"):
        await read_body(incoming(b"{}", headers={"content-encoding": encoding}), 100)


async def test_an_encoding_that_changes_nothing_is_taken() -> None:
    assert await read_body(incoming(b"{}", headers={"content-encoding": "Identity"}), 100) == b"{}"


async def test_a_caller_that_hangs_up_in_the_middle_is_noticed() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(incoming(b'{"a"', hangs_up=True), 100)
