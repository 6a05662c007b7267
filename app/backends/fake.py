"""``FakeBackend``: the contract of a backend without vLLM: deterministic, with settable speed and faults.

A token is a byte of UTF-8 and two special tokens stand beside the bytes. It answers with the prompt
in capitals, over and over, so that every text can be traced to its request.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

from app import timings
from app.backends import fake_openai
from app.backends.args import FakeArgs
from app.backends.isolation import WindowMismatch, run_isolated
from app.backends.registry import Backend
from app.errors import EngineDead, GenerationFailed, InvalidRequest, StartError
from app.prompts import bounds
from app.prompts.media import Placeholders
from app.prompts.openai import ChatCompletionRequest, OpenAIPrompt, Work
from app.prompts.sampling import SamplingFields
from app.prompts.spec import ChatMessage, GenerateRequest
from app.prompts.templates import environment, join_plain, load_request_format
from app.request import Answer, AnswerHead, Generation, Outcome, Output, Request, Resolved, Window
from app.timings import EngineStats

BOS_TOKEN_ID = 256
VOCAB_SIZE = 258
DEFAULT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


DEFAULTS: dict[str, Any] = dict.fromkeys(SamplingFields.model_fields) | {
    "n": 1,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "bad_words": [],
}
"""As vLLM's ``SamplingParams`` has them."""


@Backend.register("fake")
class FakeBackend(Backend):
    """For tests and for clients under development."""

    args: FakeArgs

    def __init__(self, args: FakeArgs) -> None:
        super().__init__(args)
        self.takes_windows = args.scheduling == "window" and not args.streams
        self.release = "direct" if args.streams else "rolling"
        self.windows_run: list[int] = []
        """How many requests each run held, re-runs included."""

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return self.args.max_model_len

    def _open(self) -> None:
        time.sleep(self.args.open_s)
        if self.args.faults.fail_open is not None:
            raise StartError(self.args.faults.fail_open)
        self._format = load_request_format(self.args.request_format)
        self._template = environment().from_string(self._format.template or DEFAULT_TEMPLATE)

    async def _prove(self) -> None:
        """It has no engine that could be without statistics."""

    def _close(self) -> None:
        """Nothing is held."""

    def info(self) -> dict[str, Any]:
        """The arguments."""
        return {
            "kind": self.args.kind,
            "engine_process": "inline",
            "engine_args": {"max_model_len": {"value": self.args.max_model_len, "source": "fake"}},
            "generation_defaults": {},
            "request_format": self.args.request_format,
            "versions": {},
            "threads": {},
            "media": [],
            "adapters": [],
            "warnings": [],
        }

    def _resolve(self, body: Work) -> Resolved:
        if body.media:
            raise InvalidRequest(f"this model takes no {body.media[0].modality}", param=body.media[0].param)
        return self._resolve_openai(body) if isinstance(body, OpenAIPrompt) else self._resolve_generate(body)

    def _resolve_openai(self, prompt: OpenAIPrompt) -> Resolved:
        body, given = prompt.body, prompt.prompt
        if isinstance(given, list):
            bounds.check_token_ids(given, VOCAB_SIZE, prompt.param)
            ids = given
        elif isinstance(body, ChatCompletionRequest):
            ids = self._conversation_ids(body.messages, body.chat_template_kwargs, body.continue_final_message, None)
        else:
            ids = self._text_ids(given or "", None, [BOS_TOKEN_ID] if given else [])
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param=prompt.param)
        bounds.check_context(len(ids), self.max_model_len)
        sampling = self._completed(fake_openai.sampling_of(body, self.max_model_len - len(ids)), len(ids))
        return Resolved(ids, sampling, sampling, prompt, body.cache_salt)

    def _shape(self, answers: Sequence[Answer], head: AnswerHead) -> dict[str, Any]:
        return fake_openai.answer(answers, head)

    def _resolve_generate(self, body: GenerateRequest) -> Resolved:
        ids = bounds.keep_last(self._prompt_ids(body), body.truncate_prompt_tokens)
        bounds.check_context(len(ids), self.max_model_len)
        if body.prompt_token_ids is not None:
            bounds.check_token_ids(ids, VOCAB_SIZE, "prompt_token_ids")
        sampling = self._completed(body.given(), len(ids))
        return Resolved(ids, sampling, sampling)

    def _prompt_ids(self, body: GenerateRequest) -> list[int]:
        if body.prompt_token_ids is not None:
            return body.prompt_token_ids
        if body.prompt is not None:
            return self._text_ids(body.prompt, body.truncate_prompt_tokens, [BOS_TOKEN_ID])
        messages = body.conversation
        kwargs, goes_on = body.chat_template_kwargs, body.continue_final_message
        return self._conversation_ids(messages, kwargs, goes_on, body.truncate_prompt_tokens)

    def _conversation_ids(
        self, messages: list[ChatMessage], kwargs: dict[str, Any] | None, goes_on: bool | None, keep: int | None
    ) -> list[int]:
        if self._format.kind == "plain":
            return self._text_ids(join_plain(messages, Placeholders(None, None), "messages"), keep, [BOS_TOKEN_ID])
        return self._text_ids(self._render(messages, kwargs or {}, bool(goes_on)), keep, [])

    def _text_ids(self, text: str, keep: int | None, special: list[int]) -> list[int]:
        """A byte is a token; no list is made of what is too long or will be cut."""
        encoded = text.encode()
        if keep is None:
            bounds.check_context(len(special) + len(encoded), self.max_model_len)
            return [*special, *encoded]
        return [*special, *encoded[-keep:]]

    def _render(self, messages: list[ChatMessage], extra: dict[str, Any], goes_on: bool) -> str:
        plain = [{"role": message.role, "content": "".join(message.text_parts)} for message in messages]
        try:
            return self._template.render(**{"messages": plain, "add_generation_prompt": not goes_on, **extra})
        except Exception as error:
            raise InvalidRequest(f"the chat template refuses this: {error}", param="messages") from error

    def _completed(self, given: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
        """The settings in force, of those that are given."""
        values = {**DEFAULTS, "max_tokens": self.args.default_max_tokens, **given}
        values["max_tokens"] = min(values["max_tokens"], self.max_model_len - prompt_tokens)
        bounds.check_token_ids(values["stop_token_ids"] or [], VOCAB_SIZE, "stop_token_ids")
        bounds.check_bias(values["logit_bias"] or {}, VOCAB_SIZE)
        if values["n"] > 1 and values["temperature"] == 0:
            raise InvalidRequest("n must be 1 when using greedy sampling", param="n")
        if values["logit_bias"] is not None:
            values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"].items()}
        return values

    async def generate(self, window: Window) -> list[Outcome]:
        """As the base class has it; a request by itself on the event loop."""
        if self.takes_windows:
            return await super().generate(window)
        (request,) = window.requests
        try:
            result: Generation | Exception = await self._by_itself(request)
        except GenerationFailed as error:
            result = error
        return [Outcome(request, window, 0, result)]

    async def _by_itself(self, request: Request) -> Generation:
        """The generation of one request, of whose tokens its listener is told as they come."""
        self.windows_run.append(1)
        text, faults, started = _text(request), self.args.faults, timings.now()
        if _holds(text, faults.die_text):
            self._report_death("the fake engine was told to die")
            raise EngineDead("the engine died while this request was in it")
        if _holds(text, faults.hang_text):
            await asyncio.sleep(faults.hang_s)
        if _holds(text, faults.fail_text):
            raise GenerationFailed("the fake engine was told to fail")
        planned = _generation(request, text, started, self.args.step_ms / 1000)
        await self._tell(request, planned, is_cut=_holds(text, faults.break_text))
        return _generation(request, text, started, self.args.step_ms / 1000)

    async def _tell(self, request: Request, planned: Generation, *, is_cut: bool) -> None:
        length = max(len(output.token_ids) for output in planned.outputs)
        for step in range(length):
            await asyncio.sleep(self.args.step_ms / 1000)
            if is_cut and step == 2:
                raise GenerationFailed("the fake engine was told to break off")
            if request.listener is not None:
                request.listener(fake_openai.step_of(planned, step), step == length - 1)

    def stream(
        self, prompts: Sequence[Resolved], outputs: AsyncIterator[tuple[int, Any]], head: AnswerHead
    ) -> AsyncGenerator[bytes, None]:
        """As the base class has it."""
        return fake_openai.chunks(prompts, outputs, head)

    def _run(self, window: Window) -> list[Outcome]:
        return run_isolated(window, self._generate, lambda: None)

    def _generate(self, window: Window) -> list[Generation | Exception]:
        self.windows_run.append(len(window.requests))
        texts = [_text(request) for request in window.requests]
        self._play_faults("".join(texts))
        started = timings.now()
        longest = max(request.resolved.params["max_tokens"] for request in window.requests)
        time.sleep(longest * self.args.step_ms / 1000)
        if self.args.faults.wrong_count:
            raise WindowMismatch("another number of outputs came back than requests went in")
        return [
            _generation(request, text, started, self.args.step_ms / 1000)
            for request, text in zip(window.requests, texts, strict=True)
        ]

    def _play_faults(self, text: str) -> None:
        faults = self.args.faults
        if faults.die_text is not None and faults.die_text in text:
            raise SystemExit("the fake engine was told to die")
        if faults.hang_text is not None and faults.hang_text in text:
            time.sleep(faults.hang_s)
        if faults.fail_text is not None and faults.fail_text in text:
            raise RuntimeError("the fake engine was told to fail")


def _holds(text: str, mark: str | None) -> bool:
    return mark is not None and mark in text


def _text(request: Request) -> str:
    return bytes(token for token in request.resolved.prompt_token_ids if token < 256).decode(errors="replace")


def _generation(request: Request, text: str, started: float, step_s: float) -> Generation:
    """The prompt in capitals, one byte a token, and stamps as an engine would leave them."""
    params, ended = request.resolved.params, timings.now()
    ids = list(islice(cycle(text.upper().encode() or b"?"), params["max_tokens"]))
    out, stop_reason = _until_stop(bytes(ids).decode(errors="replace"), params["stop"])
    used = ids if stop_reason is None else ids[: max(1, len((out + stop_reason).encode()))]
    logprobs = None if params["logprobs"] is None else list(_logprobs(used, params["logprobs"]))
    first = min(ended, started + step_s)
    stats = EngineStats(started, started, first, ended, first - started, len(used), 0)
    reason = "length" if stop_reason is None else "stop"
    return Generation(
        outputs=[Output(index, out, used, reason, stop_reason, logprobs) for index in range(request.places)],  # type: ignore[arg-type]
        prompt_logprobs=None,
        cached_tokens=0,
        stats=stats,
    )


def _until_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    found = min(((text.find(stop), stop) for stop in stops if stop in text), default=None)
    return (text, None) if found is None else (text[: found[0]], found[1])


def _logprobs(ids: list[int], count: int) -> Iterator[dict[str, Any]]:
    for token in ids:
        entry = {"token_id": token, "token": chr(token), "logprob": -0.5, "rank": 1}
        yield {**entry, "top": [entry][:count]}
