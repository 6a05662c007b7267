"""Structured output is tried out in a process of its own before a request is admitted: see ``grammar_child``."""

import asyncio
import hashlib
import itertools
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from app.backends.grammar_judge import NOUNS, clean
from app.backends.json_schema import passed_over
from app.errors import InvalidRequest, NotReady
from app.settings import child_environment

logger = logging.getLogger(__name__)

COMMAND = [sys.executable, "-P", "-m", "app.backends.grammar_child"]
CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
MAX_SPEC_CHARS = 1 << 20
"""Of a schema, pattern or grammar: far beyond what compiles in time."""
MAX_PROPERTIES = 1000
"""Of a schema, with those of the schemas within: a thousand optional ones take seconds to compile, more explode."""
CACHED_VERDICTS = 4096
CHECK_TIMEOUT_S = 120.0
"""The longest that a check waits: for the child to warm up, and for those before it."""
PROPERTIES = ("properties", "patternProperties")
END_S = 2.0
BOUNDED_STRING = re.compile(r'^(\w+ ::= )\(\(\[\^\\"\\\\\\r\\n\]\)\)$', re.MULTILINE)
SAFE_STRING = r'\1(([^\\0-\\x1f\\"\\\\\\r\\n]))'
"""The rule that xgrammar writes for the characters of a bounded string, and what takes its place."""
Verdict = str | None
"""What is wrong; None: nothing."""


class CheckFailed(Exception):
    """A check could not be made: nothing is known about the grammar."""


class GrammarChecker:
    """Says what is wrong with a grammar, for one model.

    ``start`` before the first check; ``close`` at the end. Both are quick and may be called from any thread.

    Args:
        disable_any_whitespace: as in vLLM's ``StructuredOutputsConfig``.
    """

    def __init__(self, *, disable_any_whitespace: bool = False) -> None:
        self._disable_any_whitespace = disable_any_whitespace
        self._tokenizer_info: str | None = None
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._verdicts: OrderedDict[bytes, Future[Verdict]] = OrderedDict()
        self._waiters: Counter[Future[Verdict]] = Counter()
        self._is_closed = False
        self.made = 0
        """Checks given to the child so far; what the cache knows is not counted."""

    def start(self, tokenizer_info: str) -> None:
        """Start the child, which warms up for some seconds; checks wait for it.

        Args:
            tokenizer_info: of ``tokenizer_info``.
        """
        self._tokenizer_info = tokenizer_info
        with self._lock:
            self._current()

    @property
    def pid(self) -> int | None:
        """The child's process id, if there is one."""
        return None if self._child is None else self._child.pid

    async def check(self, kind: str, spec: str) -> Verdict:
        """What is wrong with a grammar, in one line; None: nothing.

        Args:
            kind: one of ``grammar_judge.NOUNS``; with ``spec`` from ``spec_of``.
            spec: the text of it.

        Raises:
            NotReady: the check could not be made; the request may be sent again.
        """
        asked = None
        try:
            asked = self._verdict(kind, spec)
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(asked)), CHECK_TIMEOUT_S)
        except (CheckFailed, TimeoutError) as error:
            reason = str(error) or f"no answer within {CHECK_TIMEOUT_S:g} s"
            logger.warning("a grammar could not be checked: %s", reason)
            raise NotReady(f"the structured output could not be checked: {reason}; try again") from error
        finally:
            if asked is not None:
                self._leave(asked)

    def _leave(self, asked: "Future[Verdict]") -> None:
        """One waits less; a check that nobody waits for is dropped, so that it keeps no other from its turn."""
        with self._lock:
            self._waiters[asked] -= 1
            if self._waiters[asked] > 0:
                return
            del self._waiters[asked]
            if asked.done():
                return
            self._verdicts = OrderedDict((key, known) for key, known in self._verdicts.items() if known is not asked)
            if self._child is not None:
                self._child.drop(asked)

    def _verdict(self, kind: str, spec: str) -> "Future[Verdict]":
        """Known, on its way, or asked for now: of equal grammars that come together one is tried."""
        key = hashlib.sha256(f"{kind} {spec}".encode(errors="surrogatepass")).digest()
        with self._lock:
            if (known := self._verdicts.get(key)) is not None:
                self._verdicts.move_to_end(key)
                self._waiters[known] += 1
                return known
            asked = self._current().ask(kind, spec)
            self._waiters[asked] += 1
            self.made += 1
            self._verdicts[key] = asked
            while len(self._verdicts) > CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
        asked.add_done_callback(lambda done: self._forget_failure(key, done))
        return asked

    def _forget_failure(self, key: bytes, done: "Future[Verdict]") -> None:
        if done.cancelled() or done.exception() is None:
            return
        with self._lock:
            if self._verdicts.get(key) is done:
                del self._verdicts[key]

    def _current(self) -> "_Child":
        """The child, a new one if there is none; within the lock.

        Raises:
            CheckFailed: there can be none.
        """
        if self._is_closed or self._tokenizer_info is None:
            raise CheckFailed("the service is stopping" if self._is_closed else "the model is not loaded yet")
        if self._child is None:
            settings = {
                "tokenizer_info": self._tokenizer_info,
                "disable_any_whitespace": self._disable_any_whitespace,
                "parent": os.getpid(),
            }
            self._child = _Child(settings, self._note_end)
        return self._child

    def _note_end(self, child: "_Child") -> None:
        """One that has worked is started again at once; one that never did, by the next check."""
        with self._lock, suppress(CheckFailed):
            if self._child is child:
                self._child = None
                if child.was_ready:
                    self._current()

    def with_safe_strings(self, structured_outputs: Any) -> Any:
        """A JSON schema, checked before, as a grammar whose strings are JSON.

        xgrammar 0.2.8 lets control characters into a string that has ``minLength`` or ``maxLength``, as they are, and
        no parser reads such a text. In other strings it does not; here its own grammar gets the same class of them.

        Args:
            structured_outputs: vLLM's ``StructuredOutputsParams`` with ``json``.
        """
        import xgrammar
        from vllm.sampling_params import StructuredOutputsParams

        _, schema = spec_of(structured_outputs)
        separators = (",", ":") if self._disable_any_whitespace else None
        made = xgrammar.Grammar.from_json_schema(
            schema, any_whitespace=not self._disable_any_whitespace, separators=separators
        )
        return StructuredOutputsParams(grammar=BOUNDED_STRING.sub(SAFE_STRING, str(made)))

    def close(self) -> None:
        """End the child; waits for some seconds at most."""
        with self._lock:
            self._is_closed = True
            child, self._child = self._child, None
        if child is not None:
            child.close()


class _Child:
    """One run of ``grammar_child``, with a thread that writes to it and one that reads.

    Args:
        settings: its first line.
        on_end: called once, from another thread, when it has ended.

    Raises:
        CheckFailed: it cannot be started.
    """

    def __init__(self, settings: dict[str, Any], on_end: "Callable[[_Child], None]") -> None:
        self.was_ready = False
        self._on_end = on_end
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._asked: dict[int, Future[Verdict]] = {}
        self._ids = itertools.count()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._say(settings)
        self._process = _start()
        self.pid = self._process.pid
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"grammar-{target.__name__.strip('_')}")
            for target in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, kind: str, spec: str) -> "Future[Verdict]":
        """The verdict to come; a ``CheckFailed`` when the child ends before."""
        asked: Future[Verdict] = Future()
        with self._lock:
            if self._reason is None:
                number = next(self._ids)
                self._asked[number] = asked
                self._say({"id": number, "kind": kind, "spec": spec})
                return asked
        asked.set_exception(CheckFailed(self._reason))
        return asked

    def drop(self, asked: "Future[Verdict]") -> None:
        """The verdict is not wanted any more."""
        with self._lock:
            number = next((number for number, future in self._asked.items() if future is asked), None)
            if number is not None:
                del self._asked[number]
                self._say({"drop": number})
        asked.cancel()

    def _say(self, message: dict[str, Any]) -> None:
        self._lines.put(json.dumps(message).encode() + b"\n")

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError), pipe:
            while (line := self._lines.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        reason = None
        with self._process.stdout as pipe:
            for line in pipe:
                message = json.loads(line)
                self.was_ready = self.was_ready or "ready" in message
                reason = message.get("fatal", reason)
                if "id" in message:
                    self._settle(message)
        self._finish(reason or f"the process that does it ended with status {self._process.wait()}")

    def _settle(self, message: dict[str, Any]) -> None:
        with self._lock:
            asked = self._asked.pop(message["id"], None)
        if asked is None:
            return  # it was dropped
        if "error" in message:
            asked.set_exception(CheckFailed(message["error"]))
        else:
            asked.set_result(message["message"])

    def _finish(self, reason: str) -> None:
        self._process.wait()
        with self._lock:
            self._reason = reason
            left = list(self._asked.values())
            self._asked.clear()
        self._lines.put(None)
        self._on_end(self)
        for asked in left:
            asked.set_exception(CheckFailed(reason))

    def close(self) -> None:
        """Let it end by itself, since it ends its forks; kill it if it does not, or has none yet."""
        self._lines.put(None)
        if not self.was_ready:
            self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for thread in self._threads:
            thread.join(END_S)


def _start() -> "subprocess.Popen[bytes]":
    """In a process group of its own: Ctrl-C is for the service, which drains first."""
    try:
        return subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment(CHILD_ENVIRONMENT),
            process_group=0,
        )
    except OSError as error:
        raise CheckFailed(f"no process can be started: {error.strerror}") from error


# --- what vLLM's names are needed for ---


def needs_check(backend: str) -> bool:
    """Whether grammars go to xgrammar, as does ``auto`` at first; the other backends have only vLLM's own checks.

    Args:
        backend: of vLLM's ``StructuredOutputsConfig``.
    """
    return backend in ("xgrammar", "auto")


def tokenizer_info(tokenizer: Any, model_config: Any) -> str:
    """The vocabulary as xgrammar wants it, as JSON, made as the engine makes it.

    Args:
        tokenizer: of the model.
        model_config: vLLM's ``ModelConfig``.
    """
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    config = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        model_config=model_config,
        speculative_config=None,
    )
    backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=model_config.get_vocab_size())
    compiled = backend.compiler.compile_grammar('root ::= ""')  # the compiler itself does not give it away
    return str(compiled.tokenizer_info.serialize_json())


def has_bounded_strings(structured_outputs: Any) -> bool:
    """Whether a JSON schema, to be seen by its words, bounds the length of a string."""
    if structured_outputs.json is None:
        return False
    _, schema = spec_of(structured_outputs)
    return "minLength" in schema or "maxLength" in schema


def spec_of(structured_outputs: Any) -> tuple[str, str]:
    """Kind and text of a grammar for ``GrammarChecker.check``: what vLLM will give to xgrammar.

    Args:
        structured_outputs: vLLM's ``StructuredOutputsParams``, with a constraint.

    Raises:
        InvalidRequest: too large, not JSON, nested too deep, or a schema that xgrammar would not follow in full.
    """
    from vllm.v1.structured_output.request import get_structured_output_key
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    if structured_outputs.choice is not None:
        _check_choice(structured_outputs.choice)
        return "choice", choice_as_grammar(structured_outputs.choice)
    option, spec = get_structured_output_key(structured_outputs)
    kind = option.name.lower()
    _check_size(kind, len(spec))
    if kind in ("json", "structural_tag"):
        _check_json(kind, spec)
    return "lark" if kind == "grammar" and grammar_is_likely_lark(spec) else kind, spec


def _check_choice(choice: Any) -> None:
    if not choice:
        raise InvalidRequest("the choice is an empty list: give the texts to choose from")
    _check_size("choice", sum(len(text) for text in choice))


def _check_size(kind: str, chars: int) -> None:
    if chars > MAX_SPEC_CHARS:
        raise InvalidRequest(f"{NOUNS[kind]} has {chars} characters; the limit is {MAX_SPEC_CHARS}")


def _check_json(kind: str, spec: str) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import check_json_nesting

    try:
        check_json_nesting(spec, structural_tag=kind == "structural_tag")
        parsed = json.loads(spec)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{NOUNS[kind]} is not JSON: {error}") from error
    except VLLMValidationError as error:
        raise InvalidRequest(f"{NOUNS[kind]} cannot be used: {clean(error)}") from error
    if (properties := _count_properties(parsed)) > MAX_PROPERTIES:
        raise InvalidRequest(f"{NOUNS[kind]} has {properties} properties; the limit is {MAX_PROPERTIES}")
    for schema in [parsed] if kind == "json" else _schemas_of_tools(parsed):
        if (feature := passed_over(schema) or unsupported_feature(schema)) is not None:
            raise InvalidRequest(f"the JSON schema uses what xgrammar does not support: {feature}; leave it out")


def _schemas_of_tools(part: Any) -> Iterator[Any]:
    """The JSON schemas within a structural tag."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part if isinstance(part, list) else ()):
        if key in ("json_schema", "schema"):
            yield value
        else:
            yield from _schemas_of_tools(value)


def _count_properties(part: Any) -> int:
    """Of all the schemas within; the nesting is bounded before."""
    if isinstance(part, list):
        return sum(map(_count_properties, part))
    if not isinstance(part, dict):
        return 0
    own = sum(len(part[key]) for key in PROPERTIES if isinstance(part.get(key), dict))
    return own + sum(map(_count_properties, part.values()))


def unsupported_feature(schema: Any) -> str | None:
    """What of a schema xgrammar would ignore, by keyword and place; None: nothing."""
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features as is_unsupported

    if not is_unsupported(schema):
        return None
    path, part = "#", schema
    while (deeper := next((item for item in _parts(part) if is_unsupported(item[1])), None)) is not None:
        path, part = f"{path}/{deeper[0]}", deeper[1]
    at_fault = [key for key in part if not is_unsupported({name: part[name] for name in part if name != key})]
    keywords = [key for key in at_fault if key != "type"] or list(part)[:1]
    return f"{' with '.join(keywords)} at {path}"


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects directly within a schema, those in its lists too, by their place."""
    for key, value in schema.items():
        if isinstance(value, dict):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}/{index}", item) for index, item in enumerate(value) if isinstance(item, dict))
