"""What xgrammar makes of a grammar: looked over for loops, compiled as vLLM does it, and tried for some tokens.

Runs in processes that may die of it (``grammar_child``); vLLM is not imported here.
"""

import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

NOUNS = {
    "json": "the JSON schema",
    "json_object": "the JSON object",
    "regex": "the pattern",
    "choice": "the choice",
    "grammar": "the grammar",
    "lark": "the grammar",
    "structural_tag": "the structural tag",
}
"""The kinds of grammar, and what a message calls each."""
PARSE, COMPILE, WALK = "parse", "compile", "walk"
"""The stages of a judgement: as text and for a vocabulary of single bytes, where what explodes does so at once; for the
model's vocabulary, where an ordinary bound on a string's length takes seconds; and over the first tokens."""
MAX_REASON_CHARS = 300
WALK_STEPS = 128
"""Tokens that are tried: an ambiguous grammar costs tens of milliseconds each, which the engine would spend while all
others wait; a wrong one comes to a place where none is allowed."""
CLOSERS = frozenset(bytes([char]) for char in b'"{}[],:')
"""Tokens that lead a walk through JSON on to its next part; at random it would stay in the first string."""
SERIALIZATION_VERSION = "v16"
"""Of xgrammar's JSON form of a grammar, in which the numbers below hold."""
RULE_REF, SEQUENCE, CHOICES, REPEAT = 4, 5, 6, 8


class Judge:
    """Compiles grammars for one vocabulary, one after another, with one thread and without a cache.

    Args:
        tokenizer_info: xgrammar's ``TokenizerInfo`` as JSON.
        disable_any_whitespace: vLLM's setting: JSON comes without free white space.
    """

    def __init__(self, tokenizer_info: str, *, disable_any_whitespace: bool) -> None:
        import numpy as np
        import xgrammar

        self._xgrammar = xgrammar
        self._is_compact = disable_any_whitespace
        info = xgrammar.TokenizerInfo.deserialize_json(tokenizer_info)
        self.vocab_size: int = info.vocab_size
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        single_bytes = xgrammar.TokenizerInfo([*(bytes([char]) for char in range(256)), b"<end>"], stop_token_ids=[256])
        self._byte_compiler = xgrammar.GrammarCompiler(single_bytes, max_threads=1, cache_enabled=False)
        self._is_closer = np.array([text in CLOSERS for text in info.decoded_vocab])

    def judge(self, kind: str, spec: str, begin: Callable[[str], None]) -> str | None:
        """What is wrong with a grammar; None: nothing.

        Args:
            kind: one of ``NOUNS``.
            spec: the text of it, as vLLM gives it to xgrammar.
            begin: called with each stage before it.
        """
        if reason := _wrong_at_sight(kind, spec):
            return f"{NOUNS[kind]} {reason}"
        begin(PARSE)
        if (rule := self._parse(kind, spec)) is not None:
            return f"{NOUNS[kind]} {_of_endless(kind, rule)}"
        begin(COMPILE)
        try:
            compiled = self._compile(self._compiler, kind, spec)
        except Exception as error:
            if isinstance(error, MemoryError) or "bad_alloc" in str(error):
                raise MemoryError from error
            return f"{NOUNS[kind]} is wrong: {clean(error)}"
        begin(WALK)
        if (position := self._walk(compiled)) is not None:
            where = "" if position == 0 else f" after {position} tokens"
            return f"{NOUNS[kind]} allows no token{where}: no text can match it"
        return None

    def _parse(self, kind: str, spec: str) -> str | None:
        """The rule that never ends, if there is one; what else is wrong is left to the model's compiler to say."""
        with suppress(Exception):
            if (rule := self._endless_rule(kind, spec)) is not None:
                return rule
            self._compile(self._byte_compiler, kind, spec)
        return None

    def _endless_rule(self, kind: str, spec: str) -> str | None:
        """Looks at the grammar as it is written: compiled, its form as JSON grows with the square of its size."""
        parsers: dict[str, Callable[..., Any]] = {
            "json": self._xgrammar.Grammar.from_json_schema,
            "grammar": self._xgrammar.Grammar.from_ebnf,
            "lark": self._xgrammar.Grammar.from_lark,
            "structural_tag": self._xgrammar.Grammar.from_structural_tag,
        }
        if kind not in parsers:
            return None  # nothing in it can refer to anything
        arguments = _structural_tag(self._xgrammar, spec) if kind == "structural_tag" else (spec,)
        return endless_rule(json.loads(parsers[kind](*arguments).serialize_json()))

    def _compile(self, compiler: Any, kind: str, spec: str) -> Any:
        """The same calls as in vLLM's ``XgrammarBackend.compile_grammar``."""
        as_json = functools.partial(
            compiler.compile_json_schema,
            any_whitespace=not self._is_compact,
            separators=(",", ":") if self._is_compact else None,
        )
        calls: dict[str, Callable[[str], Any]] = {
            "json": as_json,
            "json_object": lambda _: as_json('{"type": "object"}'),
            "regex": compiler.compile_regex,
            "choice": compiler.compile_grammar,
            "grammar": compiler.compile_grammar,
            "lark": compiler.compile_lark,
            "structural_tag": lambda text: compiler.compile_structural_tag(*_structural_tag(self._xgrammar, text)),
        }
        return calls[kind](spec)

    def _walk(self, compiled: Any) -> int | None:
        """Let some allowed tokens through, the same ones each time; the position at which none is allowed."""
        matcher = self._xgrammar.GrammarMatcher(compiled)
        bitmask = self._xgrammar.allocate_token_bitmask(1, self.vocab_size)
        dice = random.Random(0)
        for position in range(WALK_STEPS):
            matcher.fill_next_token_bitmask(bitmask)
            allowed = _set_bits(bitmask, self.vocab_size)
            if allowed.size == 0:
                return position
            closers = allowed[self._is_closer[allowed]]
            choice = closers if position % 2 and closers.size else allowed
            matcher.accept_token(int(choice[dice.randrange(choice.size)]))
            if matcher.is_terminated():
                return None
        return None


def _structural_tag(xgrammar: Any, spec: str) -> tuple[Any, ...]:
    """What vLLM gives to xgrammar for a structural tag: an older form comes in parts."""
    tag = json.loads(spec)
    if "structures" not in tag:
        return (spec,)
    items = [
        xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
        for item in tag["structures"]
    ]
    return items, tag["triggers"]


def _set_bits(bitmask: Any, size: int) -> Any:
    """The token ids that a bitmask allows, as an array; beyond the vocabulary its bits mean nothing."""
    import numpy as np

    return np.flatnonzero(np.unpackbits(bitmask.numpy().view(np.uint8), count=size, bitorder="little"))


def _wrong_at_sight(kind: str, spec: str) -> str | None:
    if kind == "regex" and "\x00" in spec:
        return "must not hold a NUL character: xgrammar's parser of patterns cannot read it"
    if kind not in ("regex", "json_object") and not spec.strip():
        return "is empty"
    return None


def _of_endless(kind: str, rule: str) -> str:
    if kind == "json":
        return "refers to itself ($ref) with no way to end, so no text can match it: make a part of the loop optional"
    return f"never ends: rule {rule!r} always comes back to itself; give it an alternative that does not"


def clean(error: Exception) -> str:
    """The error in one line, without the place in xgrammar's source and without the text that it repeats."""
    text = re.sub(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ", "", str(error) or type(error).__name__)
    text = re.sub(r"Check failed: \(.*?\) is false: ", "", text).partition("The JSON string is:")[0]
    return " ".join(text.split())[:MAX_REASON_CHARS]


def endless_rule(grammar: dict[str, Any]) -> str | None:
    """The name of a rule that the text can come to and that no finite text matches.

    Args:
        grammar: xgrammar's serialised form; one of another version is let through.
    """
    if grammar.get("__VERSION__") != SERIALIZATION_VERSION:
        return None
    bodies = _Bodies(grammar)
    ending = _ending_rules(bodies)
    stuck = next((rule for rule in _reachable(bodies, grammar["root_rule_id"]) if rule not in ending), None)
    return None if stuck is None else str(grammar["rules"][stuck][0])


class _Bodies:
    """The rules' bodies: expressions by number, each ``type, length, items…`` in one flat list."""

    def __init__(self, grammar: dict[str, Any]) -> None:
        self._data = grammar["grammar_expr_data"]
        self._starts = grammar["grammar_expr_indptr"]
        self.of_rule: list[int] = [rule[1] for rule in grammar["rules"]]

    def expression(self, number: int) -> tuple[int, list[int]]:
        start = self._starts[number]
        kind, length = self._data[start : start + 2]
        return kind, self._data[start + 2 : start + 2 + length]

    def ends(self, number: int, ending: set[int]) -> bool:
        """Whether an expression matches a finite text, given the rules that are known to."""
        kind, items = self.expression(number)
        if kind == RULE_REF:
            return items[0] in ending
        if kind == REPEAT:
            return items[1] == 0 or items[0] in ending
        if kind == SEQUENCE:
            return all(self.ends(item, ending) for item in items)
        if kind == CHOICES:
            return any(self.ends(item, ending) for item in items)
        return True

    def references(self, number: int) -> Iterator[int]:
        """The rules that an expression refers to."""
        kind, items = self.expression(number)
        if kind in (RULE_REF, REPEAT):
            yield items[0]
        elif kind in (SEQUENCE, CHOICES):
            for item in items:
                yield from self.references(item)


def _ending_rules(bodies: _Bodies) -> set[int]:
    """To and fro over the rest until it stays the same: rules mostly refer to their neighbours."""
    ending: set[int] = set()
    rest = list(range(len(bodies.of_rule)))
    before = len(rest) + 1
    while len(rest) < before:
        before = len(rest)
        for rule in reversed(rest):
            if bodies.ends(bodies.of_rule[rule], ending):
                ending.add(rule)
        rest = [rule for rule in reversed(rest) if rule not in ending]
    return ending


def _reachable(bodies: _Bodies, root: int) -> Iterator[int]:
    seen, ahead = {root}, [root]
    while ahead:
        rule = ahead.pop()
        yield rule
        for reference in bodies.references(bodies.of_rule[rule]):
            if reference not in seen:
                seen.add(reference)
                ahead.append(reference)
