"""Grammars are tried out in a process of their own: the real one, with xgrammar and the embedded model's vocabulary."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.backends import grammar_child
from app.backends.grammar import GrammarChecker, needs_check
from app.backends.grammar_judge import clean, endless_rule
from app.errors import NotReady
from app.models import embedded

pytestmark = pytest.mark.engine

WARM_UP_S = 120.0
REFUSAL_S = 5.0
"""Ten times the processor time that a refusal may take."""

FROM_VLLM = """
import json, sys
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from app.backends import grammar
from app.errors import InvalidRequest

def spec(values):
    try:
        return grammar.spec_of(StructuredOutputsParams(**values))
    except InvalidRequest as error:
        return error.message

folder, cases = sys.argv[1], sys.stdin.read()
config = EngineArgs(model=folder, structured_outputs_config={"backend": "xgrammar"}).create_model_config()
info = grammar.tokenizer_info(AutoTokenizer.from_pretrained(folder), config)
print(json.dumps({"info": info, "specs": {name: spec(values) for name, values in json.loads(cases).items()}}))
"""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "0",
}

TAG = json.dumps({"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]})


def properties(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}, **more}


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


PARAMS: dict[str, dict[str, Any]] = {
    "a schema": {"json": {"type": "object"}},
    "a schema as text": {"json": '{"type": "object"}'},
    "any object": {"json_object": True},
    "a pattern": {"regex": "[0-9]+"},
    "choices": {"choice": ["yes", 'a "no"']},
    "a grammar": {"grammar": 'root ::= "a"'},
    "a lark grammar": {"grammar": 'start: "a"'},
    "a tag": {"structural_tag": TAG},
    "not JSON": {"json": '{"type": '},
    "deep": {"json": json.loads('{"items":' * 400 + "{}" + "}" * 400)},
    "large": {"regex": "x" * 2_000_000},
    "large choices": {"choice": ["x" * 100] * 20_000},
    "no choice": {"choice": []},
    "many properties": {"json": properties(5000)},
    "many properties within": {"json": {"type": "array", "items": {"anyOf": [properties(600), properties(600)]}}},
    "many patterns": {"json": {"type": "object", "patternProperties": {f"^{n}": {} for n in range(5000)}}},
    "multipleOf": {"json": properties(2) | {"properties": {"a": {"type": "integer", "multipleOf": 3}}}},
    "pattern with a length": {"json": {"anyOf": [{}, {"type": "string", "pattern": "a+", "maxLength": 3}]}},
    "unique": {"json": {"type": "array", "uniqueItems": True}},
    "all of": {"json": {"properties": {"a": {"allOf": [{"type": "string"}, {"enum": ["a"]}]}}}},
}


@pytest.fixture(scope="module")
def from_vllm() -> dict[str, Any]:
    """What needs vLLM is asked for in a child: it is not imported into the process of the tests."""
    run = subprocess.run(
        [sys.executable, "-c", FROM_VLLM, str(embedded.prepare())],
        input=json.dumps(PARAMS),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def info(from_vllm: dict[str, Any]) -> str:
    return str(from_vllm["info"])


@pytest.fixture(scope="module")
def checker(info: str) -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    checker.start(info)
    yield checker
    checker.close()


@pytest.fixture
def own_checker(info: str) -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    checker.start(info)
    yield checker
    checker.close()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


# --- what is good ---

TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "child": {"$ref": "#"}}, "required": ["v"]}
LIST = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
        }
    },
    "$ref": "#/$defs/node",
}
GOOD = {
    "an object": ("json", json.dumps(properties(5, required=["p0"], additionalProperties=False))),
    "a tree whose child is optional": ("json", json.dumps(TREE)),
    "a linked list that may end": ("json", json.dumps(LIST)),
    "a text with a length": ("json", json.dumps({"type": "string", "maxLength": 200})),
    "a hundred required properties": ("json", json.dumps(properties(100, required=names(100)))),
    "any object": ("json_object", ""),
    "a pattern": ("regex", "[a-z]{1,20}@[a-z]{1,20}\\.com"),
    "choices": ("choice", 'root ::= "yes" | "no"'),
    "a grammar": ("grammar", 'root ::= "a" item\nitem ::= [0-9]+ | "(" item ")"'),
    "a left recursion that ends": ("grammar", 'root ::= root "a" | "b"'),
    "a lark grammar": ("lark", 'start: "a" | "b" start'),
    "a tag": ("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})),
    "a tag in the older form": ("structural_tag", TAG),
}


@pytest.mark.parametrize("name", GOOD)
async def test_a_good_one_of_each_kind_passes(checker: GrammarChecker, name: str) -> None:
    assert await checker.check(*GOOD[name]) is None


# --- what is wrong ---

MUTUAL = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
CHAIN = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(20_000)}
PATTERNS = {f"^p{n}[a-z]+$": {"type": "string"} for n in range(5000)}
BAD = {
    "a reference to itself": ("json", '{"$ref": "#"}', r"refers to itself \(\$ref\) with no way to end"),
    "references to each other": ("json", json.dumps(MUTUAL), r"refers to itself \(\$ref\)"),
    "a child that must be there": (
        "json",
        json.dumps({"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}),
        "no text can match it",
    ),
    "a reference to nothing": (
        "json",
        '{"$ref": "#/$defs/nope"}',
        r"wrong: Cannot find field \$defs in #/\$defs/nope$",
    ),
    "an unknown type": ("json", '{"type": "nonsense"}', 'the JSON schema is wrong: Unsupported type "nonsense"$'),
    "5,000 optional properties": ("json", json.dumps(properties(5000)), "more than 0.5 s to parse: .* properties"),
    "5,000 required properties": ("json", json.dumps(properties(5000, required=names(5000))), "more than 0.5 s"),
    "5,000 open properties": ("json", json.dumps(properties(5000, additionalProperties=True)), "more than 0.5 s"),
    "5,000 patterns of names": ("json", json.dumps({"type": "object", "patternProperties": PATTERNS}), "than 0.5 s"),
    "100,000 values": ("json", json.dumps({"enum": [f"value{n}" for n in range(100_000)]}), "0.5 s .* enumerations"),
    "20,000 definitions deep": ("json", json.dumps({"$defs": CHAIN, "$ref": "#/$defs/d0"}), "nested too deep|0.5 s"),
    "an open parenthesis": ("regex", "(", r"^the pattern is wrong: .* The parenthesis is not closed\.$"),
    "a lookahead": ("regex", "(?=a)b", "Lookahead is not supported"),
    "a backreference": ("regex", r"(a)\1", "Backreference is not supported"),
    "a NUL": ("regex", "a\x00", "the pattern must not hold a NUL"),
    "a lone surrogate": ("regex", "a\ud800", "the pattern is wrong: .*surrogates not allowed"),
    "words in repetitions": ("regex", r"(\w+\s?)+$", "takes too long to follow"),
    "stars of stars": ("regex", "((.*)*)*((.*)*)*((.*)*)*x", "takes too long to follow"),
    "repetitions of repetitions": ("regex", "([a-z]{1,1000}){1,1000}", "takes too long to follow"),
    "an undefined rule": ("grammar", "root ::= foo", 'the grammar is wrong: .* Rule "foo" is not defined$'),
    "no grammar": ("grammar", "::", "the grammar is wrong: .*Unexpected character"),
    "an empty grammar": ("grammar", " \n", "the grammar is empty"),
    "a left recursion": ("grammar", 'root ::= root "a"', "never ends: rule 'root' always comes back to itself"),
    "a right recursion": ("grammar", 'root ::= "x" | "y" tail\ntail ::= "a" tail', "never ends: rule 'tail'"),
    "rules that only refer": ("grammar", "root ::= a\na ::= b\nb ::= a", "never ends"),
    "an ambiguous grammar": ("grammar", 'root ::= root root root | [a-z] | ""', "takes too long to follow"),
    "a deep grammar": ("grammar", "root ::= " + "(" * 100_000, "Nest layer exceeded"),
    "an undefined lark rule": ("lark", "start: foo", "unknown name 'foo'"),
    "an unknown tag": ("structural_tag", '{"type": "structural_tag", "format": {"type": "x"}}', "not recognized: x"),
    "a tag that is no object": ("structural_tag", "3", "the structural tag is wrong"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_wrong_one_is_refused_soon_with_its_cause_and_the_next_good_one_passes(
    checker: GrammarChecker, name: str
) -> None:
    kind, spec, expected = BAD[name]
    await checker.check("json_object", "")  # warm
    started = time.monotonic()
    message = await checker.check(kind, spec)
    took_s = time.monotonic() - started

    assert message is not None
    assert re.search(expected, message), message
    assert took_s < REFUSAL_S
    assert "\n" not in message
    assert ".cc" not in message
    assert len(message) < 450
    assert await checker.check("regex", f"{name}?") is None


# --- what vLLM's names are needed for ---

KINDS = {
    "a schema": ["json", '{"type": "object"}'],
    "a schema as text": ["json", '{"type": "object"}'],
    "any object": ["json_object", ""],
    "a pattern": ["regex", "[0-9]+"],
    "choices": ["choice", 'root ::= "yes" | "a \\"no\\""'],
    "a grammar": ["grammar", 'root ::= "a"'],
    "a lark grammar": ["lark", 'start: "a"'],
    "a tag": ["structural_tag", TAG],
}
REFUSED = {
    "not JSON": "the JSON schema is not JSON: Expecting value: line 1 column 10",
    "deep": "the JSON schema cannot be used: .* at most 64 levels",
    "large": "the pattern has 2000000 characters; the limit is 1048576",
    "large choices": "the choice has 2000000 characters; the limit is",
    "no choice": "the choice is an empty list",
    "many properties": "the JSON schema has 5000 properties; the limit is 1000",
    "many properties within": "the JSON schema has 1200 properties",
    "many patterns": "the JSON schema has 5000 properties",
    "multipleOf": "xgrammar does not support: multipleOf at #/properties/a; leave it out",
    "pattern with a length": "does not support: pattern with maxLength at #/anyOf/1",
    "unique": "does not support: uniqueItems at #;",
    "all of": "does not support: allOf at #/properties/a;",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_and_text_are_those_that_vllm_gives_to_xgrammar(from_vllm: dict[str, Any], name: str) -> None:
    assert from_vllm["specs"][name] == KINDS[name]


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_no_trial_is_refused_at_once_and_by_name(from_vllm: dict[str, Any], name: str) -> None:
    assert re.search(REFUSED[name], str(from_vllm["specs"][name])), from_vllm["specs"][name]


def test_each_case_of_what_vllm_is_given_is_looked_at() -> None:
    assert PARAMS.keys() == KINDS.keys() | REFUSED.keys()


@pytest.mark.parametrize(
    ("backend", "expected"), [("xgrammar", True), ("auto", True), ("guidance", False), ("outlines", False)]
)
def test_only_what_goes_to_xgrammar_is_tried_with_it(backend: str, expected: bool) -> None:
    assert needs_check(backend) is expected


# --- the cache ---


async def test_equal_grammars_are_tried_once_one_after_another_or_together(checker: GrammarChecker) -> None:
    before = checker.made
    good, bad = ("regex", "cache[0-9]"), ("regex", "cache(")

    together = await asyncio.gather(*(checker.check(*spec) for spec in [good, bad] * 50))
    again = await asyncio.gather(checker.check(*good), checker.check(*bad))

    assert together == list(again) * 50
    assert again[0] is None
    assert again[1]
    assert checker.made == before + 2


async def test_the_kind_is_a_part_of_what_is_known(checker: GrammarChecker) -> None:
    assert await checker.check("regex", "root") is None
    assert await checker.check("grammar", "root")


async def test_the_oldest_verdict_makes_room(
    info: str, monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker
) -> None:
    monkeypatch.setattr("app.backends.grammar.CACHED_VERDICTS", 2)
    for pattern in ("room1", "room2", "room1", "room3"):
        await checker.check("regex", pattern)
    before = checker.made

    await checker.check("regex", "room1")
    assert checker.made == before
    await checker.check("regex", "room2")
    assert checker.made == before + 1


async def test_whoever_stops_waiting_leaves_the_verdict_to_the_others(checker: GrammarChecker) -> None:
    spec = ("regex", "left[0-9]{1,5}")
    first, second = (asyncio.create_task(checker.check(*spec)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()

    assert await second is None


# --- several at a time ---


async def test_checks_run_in_parallel_two_at_a_time(checker: GrammarChecker) -> None:
    await checker.check("json_object", "")
    zygote = psutil.Process(checker.pid)
    checks = [asyncio.create_task(checker.check("json", slow(number))) for number in range(4)]
    seen = 0
    while not all(check.done() for check in checks):
        seen = max(seen, len(zygote.children()))
        await asyncio.sleep(0.005)

    assert await asyncio.gather(*checks) == [None] * 4
    assert seen == grammar_child.MAX_AT_ONCE
    assert zygote.num_threads() == 1


def slow(number: int) -> str:
    """A good schema that takes about half a second."""
    return json.dumps(properties(50, additionalProperties=True, title=str(number)))


async def test_hundred_good_ones_among_bad_ones_each_get_their_own_verdict(checker: GrammarChecker) -> None:
    specs = [("regex", f"n{number}" + "(" * (number % 3 == 0)) for number in range(100)]
    verdicts = await asyncio.gather(*(checker.check(*spec) for spec in specs))

    assert [verdict is None for verdict in verdicts] == [number % 3 != 0 for number in range(100)]


# --- time and memory beyond the limits ---


async def test_a_pattern_that_is_slow_at_each_token_is_refused(checker: GrammarChecker) -> None:
    """It compiles in no time."""
    message = await checker.check("regex", "([a-z]{1,9} ){900}")

    assert message is not None
    assert message.startswith("the pattern takes too long to follow, more than 0.5 s for 128 tokens: make it less")


LIMITED = """
import os, sys
from app.backends import grammar_child
exec(sys.argv[1])
os._exit(grammar_child.main())
"""
VOCABULARY = {
    "vocab_type": 0,
    "vocab_size": 4,
    "add_prefix_space": False,
    "stop_token_ids": [3],
    "special_token_ids": [],
    "decoded_vocab": ["a", "1", "2", "<e>"],
    "sorted_decoded_vocab": [[1, "1"], [2, "2"], [0, "a"]],
    "trie_subtree_nodes_range": [1, 2, 3],
    "__VERSION__": "v16",
}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("MAX_BYTES = 1 << 20", "the choice takes more than 1 MiB to compile: give fewer or shorter ones"),
        ("MAX_CPU_S['parse'] = 0.001", "the choice takes more than 0.001 s to parse: give fewer or shorter ones"),
        ("MAX_CPU_S['compile'] = 0.001", "the choice takes more than 0.001 s to compile: give fewer or shorter ones"),
    ],
)
def test_what_goes_beyond_a_limit_is_ended_and_told_which(limit: str, expected: str) -> None:
    """Limits so low that anything is beyond them."""
    settings = {"tokenizer_info": json.dumps(VOCABULARY), "disable_any_whitespace": False, "parent": os.getpid()}
    check = {"id": 7, "kind": "choice", "spec": "root ::= " + " | ".join(f'"{number}"' for number in range(5000))}
    command = [sys.executable, "-c", LIMITED, f"grammar_child.{limit}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{json.dumps(settings)}\n{json.dumps(check)}\n")
        child.stdin.flush()
        answers = [json.loads(child.stdout.readline()) for _ in range(2)]

    assert answers == [{"ready": True}, {"id": 7, "message": expected}]


# --- deaths and ends ---


async def test_a_killed_child_is_replaced_and_only_what_it_was_at_is_not_known(own_checker: GrammarChecker) -> None:
    assert await own_checker.check("regex", "known") is None
    first = own_checker.pid
    assert first is not None
    lost = asyncio.create_task(own_checker.check("json", json.dumps(properties(300, additionalProperties=True))))
    await until(lambda: bool(psutil.Process(first).children()))
    (fork,) = psutil.Process(first).children()

    os.kill(first, signal.SIGKILL)

    with pytest.raises(NotReady, match=r"structured output could not be checked: .* status -9; try again"):
        await lost
    await until(lambda: is_gone(fork.pid))
    await until(lambda: own_checker.pid not in (first, None))
    assert await own_checker.check("regex", "(") is not None
    assert await own_checker.check("regex", "after") is None
    made = own_checker.made
    assert await own_checker.check("regex", "known") is None
    assert own_checker.made == made


async def test_a_killed_fork_is_an_error_of_its_check_alone_and_is_not_kept(own_checker: GrammarChecker) -> None:
    spec = ("json", json.dumps(properties(100, additionalProperties=True)))
    await own_checker.check("json_object", "")
    zygote = psutil.Process(own_checker.pid)
    lost = asyncio.create_task(own_checker.check(*spec))
    await until(lambda: bool(zygote.children()))
    zygote.children()[0].kill()

    with pytest.raises(NotReady, match="status -9"):
        await lost
    assert await own_checker.check(*spec) is None
    assert own_checker.pid == zygote.pid


async def test_closing_leaves_no_process_and_fails_what_waits(info: str) -> None:
    checker = GrammarChecker()
    checker.start(info)
    await checker.check("json_object", "")
    pid = checker.pid
    assert pid is not None
    lost = asyncio.create_task(checker.check("json", json.dumps(properties(300, additionalProperties=True))))
    await until(lambda: bool(psutil.Process(pid).children()))
    processes = [pid, psutil.Process(pid).children()[0].pid]

    started = time.monotonic()
    await asyncio.to_thread(checker.close)
    took_s = time.monotonic() - started

    assert [is_gone(pid) for pid in processes] == [True, True]
    assert took_s < REFUSAL_S
    for check in (lost, checker.check("regex", "late")):
        with pytest.raises(NotReady):
            await check
    assert checker.pid is None


async def test_closing_does_not_wait_for_a_child_that_warms_up(info: str) -> None:
    checker = GrammarChecker()
    checker.start(info)
    pid = checker.pid
    assert pid is not None
    checker.close()

    assert is_gone(pid)


async def test_a_check_before_the_start_is_told(info: str) -> None:
    with pytest.raises(NotReady, match="not loaded yet"):
        await GrammarChecker().check("regex", "a")


async def test_a_child_that_cannot_begin_says_why_and_is_tried_again_by_the_next_check() -> None:
    checker = GrammarChecker()
    checker.start('{"broken": 1}')
    try:
        for _ in range(2):
            with pytest.raises(NotReady, match=r"could not be checked: .*Error"):
                await checker.check("regex", "a")
    finally:
        checker.close()


PARENT = """
import asyncio, sys, time
from pathlib import Path
from app.backends.grammar import GrammarChecker

async def main():
    checker = GrammarChecker()
    checker.start(Path(sys.argv[1]).read_text())
    await checker.check("json_object", "")
    print(checker.pid, flush=True)
    await checker.check("json", sys.argv[2])

asyncio.run(main())
"""


def test_a_killed_parent_leaves_nothing_behind(info: str, tmp_path: Path) -> None:
    (tmp_path / "info.json").write_text(info)
    spec = json.dumps(properties(300, additionalProperties=True))
    command = [sys.executable, "-c", PARENT, str(tmp_path / "info.json"), spec]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        asyncio.run(until(lambda: bool(psutil.Process(pid).children())))
        fork = psutil.Process(pid).children()[0].pid
        parent.kill()

    asyncio.run(until(lambda: is_gone(pid) and is_gone(fork)))


async def test_signals_of_the_services_group_do_not_reach_the_child(own_checker: GrammarChecker) -> None:
    await own_checker.check("json_object", "")
    pid = own_checker.pid
    assert pid is not None
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGTERM)  # as a supervisor does that signals every process it finds

    assert await own_checker.check("regex", "still") is None
    assert own_checker.pid == pid


# --- the pure parts ---


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "[21:40:15] /project/cpp/a.cc:820: EBNF parser error at line 2: Expect\n element\n",
            "EBNF parser error at line 2: Expect element",
        ),
        (
            "[21:40:15] /x/y.cc:1: Check failed: (error.empty()) is false: Failed: near: . The JSON string is:{",
            "Failed: near: .",
        ),
        ("", "ValueError"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_what_xgrammar_says_becomes_one_line_without_its_sources(said: str, expected: str) -> None:
    assert clean(ValueError(said)) == expected


def test_a_form_of_another_version_is_let_through() -> None:
    assert endless_rule({"__VERSION__": "v99"}) is None


async def test_checks_that_nobody_waits_for_keep_no_other_from_its_turn(checker: GrammarChecker) -> None:
    def slow(number: int) -> str:
        names = {name: {"type": "string", "maxLength": 400 + number} for name in ("a", "b", "c", "d")}
        return json.dumps({"type": "object", "properties": names})

    abandoned = [asyncio.create_task(checker.check("json", slow(number))) for number in range(24)]
    await asyncio.sleep(0.2)
    for task in abandoned:
        task.cancel()
    await asyncio.gather(*abandoned, return_exceptions=True)

    async with asyncio.timeout(REFUSAL_S):
        assert await checker.check("regex", "one|two|three") is None


async def test_one_of_two_that_ask_the_same_may_go(checker: GrammarChecker) -> None:
    spec = json.dumps({"type": "string", "maxLength": 333})
    stays, goes = (asyncio.create_task(checker.check("json", spec)) for _ in range(2))
    await asyncio.sleep(0.05)
    goes.cancel()

    assert await stays is None
