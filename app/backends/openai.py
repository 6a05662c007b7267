"""vLLM's own server classes without their server: what they check of OpenAI's bodies, and the answers they make.

Three threads come here, each with a tokenizer of its own: the resolver asks for requests and parsers
(``RequestSide``), the shaper for whole answers (``AnswerSide``), the event loop for streamed ones (``StreamSide``).
"""

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from pydantic import ValidationError

from app.backends.args import VLLMArgs
from app.errors import GenerationFailed, InvalidRequest, StartError
from app.prompts.openai import ChatCompletionRequest, OpenAIBody, OpenAIPrompt
from app.request import AnswerHead, Resolved

T = TypeVar("T")
NO_PROMPT = "-"
"""Stands for the prompt in vLLM's request: it is resolved elsewhere."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What the answer to a prompt is made from, beside the engine's output.

    Attributes:
        request: vLLM's ``CompletionRequest`` or ``ChatCompletionRequest``.
        text: the prompt as text where there is one, else None.
        conversation: the messages as the template saw them.
        template_arguments: the variables of the template, which parsers are told of.
    """

    request: Any
    text: str | None
    conversation: list[Any]
    template_arguments: dict[str, Any]


class _Side:
    """vLLM's two serving classes over one tokenizer."""

    def __init__(self, vllm_config: Any, tokenizer: Any, args: VLLMArgs) -> None:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

        renderer = SimpleNamespace(tokenizer=tokenizer, get_tokenizer=lambda: tokenizer)
        client = SimpleNamespace(
            model_config=vllm_config.model_config, vllm_config=vllm_config, renderer=renderer, input_processor=None
        )
        shared = {"online_renderer": None, "request_logger": None, "enable_prompt_tokens_details": True}
        self.tokenizer = tokenizer
        self.completion = OpenAIServingCompletion(client, None, **shared)
        self.chat = OpenAIServingChat(
            client,
            None,
            "assistant",
            chat_template=None,
            chat_template_content_format="auto",
            tool_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser or "",
            enable_auto_tools=args.tool_call_parser is not None,
            **shared,
        )

    def _prompt_text(self, resolved: Resolved) -> str | None:
        """The prompt as text, which only some answers hold: token ids are put into words for these alone."""
        origin: Origin = resolved.origin
        if origin.text is None and origin.request.echo:
            return str(self.tokenizer.decode(resolved.prompt_token_ids))
        return origin.text

    def serving(self, request: Any) -> Any:
        """The class for a vLLM request."""
        return self.chat if hasattr(request, "messages") else self.completion

    def parser(self, request: Any, template_arguments: dict[str, Any]) -> Any:
        """A parser of tool calls and reasoning for one answer; None when no setting asks for one."""
        if self.chat.parser_cls is None:
            return None
        return self.chat.parser_cls(
            self.tokenizer,
            request.tools,
            chat_template_kwargs=template_arguments,
            model_config=self.chat.model_config,
        )


class RequestSide(_Side):
    """From bodies to vLLM's requests and sampling settings."""

    def request(self, prompt: OpenAIPrompt) -> Any:
        """The request in vLLM's own class, checked as its server does.

        Raises:
            InvalidRequest: vLLM refuses it.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as VLLMChatRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest as VLLMCompletionRequest
        from vllm.exceptions import VLLMClientError

        fields = prompt.body.for_vllm()
        try:
            if isinstance(prompt.body, ChatCompletionRequest):
                request = VLLMChatRequest.model_validate(fields)
                self._check_tools(request)
            else:
                request = VLLMCompletionRequest.model_validate({**fields, "prompt": NO_PROMPT})
            request.build_tok_params(self.chat.model_config)  # checks numbers of tokens against the context
        except ValidationError as error:
            raise _first_of(error) from error
        except VLLMClientError as error:
            raise InvalidRequest(str(error), param=getattr(error, "parameter", None)) from error
        return request

    def _check_tools(self, request: Any) -> None:
        parser = self.chat.parser_cls
        if request.tool_choice in (None, "none") or (parser is not None and parser.tool_parser_cls is not None):
            return
        raise InvalidRequest("tools need the setting tool_call_parser, which names vLLM's parser", param="tool_choice")

    def template_arguments(self, request: Any) -> dict[str, Any]:
        """The variables of the chat template, as vLLM's server sets them."""
        arguments: dict[str, Any] = request.build_chat_params(None, "auto").chat_template_kwargs
        return {name: value for name, value in arguments.items() if value is not None}

    def adjust(self, request: Any, template_arguments: dict[str, Any]) -> Any:
        """The request with what its parsers ask of the text: a tool that must be called becomes a grammar."""
        parser = self.chat.parser_cls
        if parser is None or not hasattr(request, "messages"):
            return request
        is_concerned = parser.always_adjust_request or parser.reasoning_parser_cls or request.tool_choice != "none"
        return self.parser(request, template_arguments).adjust_request(request) if is_concerned else request

    def sampling_params(self, request: Any, prompt_tokens: int, max_model_len: int) -> Any:
        """A fresh ``SamplingParams``, with the defaults of vLLM's server."""
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
        from vllm.sampling_params import RequestOutputKind

        serving, given = self.serving(request), vars(request)  # to read a deprecated field without its warning
        newer = given.get("max_completion_tokens")
        max_tokens = get_max_tokens(
            max_model_len,
            given["max_tokens"] if newer is None else newer,
            prompt_tokens,
            serving.default_sampling_params,
            serving.override_max_tokens,
        )
        params = request.to_sampling_params(max_tokens, serving.default_sampling_params)
        params.output_kind, params.skip_clone = RequestOutputKind.FINAL_ONLY, False
        return params


class AnswerSide(_Side):
    """From the engine's outputs to OpenAI's answers."""

    def answer(self, parts: Sequence[tuple[Resolved, Any]], head: AnswerHead) -> dict[str, Any]:
        """The answer as plain JSON values.

        Args:
            parts: each prompt of the body with vLLM's ``RequestOutput``.
            head: id, time and model.

        Raises:
            GenerationFailed: vLLM finds no answer in it.
        """
        origin: Origin = parts[0][0].origin
        for resolved, output in parts:
            output.prompt = self._prompt_text(resolved)
        outputs = [output for _, output in parts]
        is_chat = hasattr(origin.request, "messages")
        answer = self._chat(parts[0][0], outputs[0], head) if is_chat else self._completion(origin, outputs, head)
        if not hasattr(answer, "choices"):
            raise GenerationFailed(f"no answer could be made: {answer.error.message}")
        answer.created = head.created
        values: dict[str, Any] = answer.model_dump(mode="json")
        return values

    def _completion(self, origin: Origin, outputs: list[Any], head: AnswerHead) -> Any:
        from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata

        return self.completion.request_output_to_completion_response(
            outputs,
            origin.request,
            head.id,
            head.created,
            head.model,
            self.tokenizer,
            RequestResponseMetadata(request_id=head.id),
        )

    def _chat(self, resolved: Resolved, output: Any, head: AnswerHead) -> Any:
        from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata

        origin: Origin = resolved.origin
        return _finish(
            self.chat.chat_completion_full_generator(
                origin.request,
                _alone(output),
                head.id,
                head.model,
                origin.conversation,
                self.tokenizer,
                RequestResponseMetadata(request_id=head.id),
                parser=self.parser(origin.request, origin.template_arguments),
                mm_token_counts=_media_tokens(resolved),
            )
        )


class StreamSide(_Side):
    """From the engine's outputs, as they come, to the chunks of OpenAI's answers."""

    async def chunks(
        self, prompts: Sequence[Resolved], outputs: AsyncIterator[tuple[int, Any]], head: AnswerHead
    ) -> AsyncGenerator[bytes, None]:
        """The JSON of each chunk.

        Args:
            prompts: those of the body.
            outputs: vLLM's ``RequestOutput``, each with what is new, and with the number of its prompt.
            head: id, time and model.

        Raises:
            ServiceError: what ``outputs`` raises.
            GenerationFailed: vLLM finds no answer in them.
        """
        source = _Source(outputs, [self._prompt_text(resolved) for resolved in prompts])
        async with contextlib.aclosing(self._events(prompts, source, head)) as events:
            async for event in events:
                data = event.removeprefix("data: ").rstrip()
                if source.failure is not None:
                    raise source.failure
                if data.startswith('{"error"'):
                    raise GenerationFailed(f"no answer could be made: {json.loads(data)['error']['message']}")
                if data != "[DONE]":
                    yield data.encode()

    def _events(self, prompts: Sequence[Resolved], source: "_Source", head: AnswerHead) -> AsyncGenerator[str, None]:
        from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata

        origin: Origin = prompts[0].origin
        request, metadata = origin.request, RequestResponseMetadata(request_id=head.id)
        events: AsyncGenerator[str, None]
        if hasattr(request, "messages"):
            events = self.chat.chat_completion_stream_generator(
                request,
                source.of_one(),
                head.id,
                head.model,
                origin.conversation,
                self.tokenizer,
                metadata,
                chat_template_kwargs=origin.template_arguments,
                mm_token_counts=_media_tokens(prompts[0]),
            )
            return events
        events = self.completion.completion_stream_generator(
            request, [], source, head.id, head.created, head.model, len(prompts), self.tokenizer, metadata
        )
        return events


class _Source:
    """The engine's outputs with the text of their prompts. Ends at a failure, of which vLLM would make an event.

    Attributes:
        failure: what ended it.
    """

    def __init__(self, outputs: AsyncIterator[tuple[int, Any]], texts: Sequence[str | None]) -> None:
        self._outputs = outputs
        self._texts = texts
        self._scores: dict[int, Any] = {}
        self.failure: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        try:
            async for index, output in self._outputs:
                output.prompt = self._texts[index] or ""
                # vLLM tells them with the first output alone, and each choice that echoes the prompt wants them.
                output.prompt_logprobs = self._scores.setdefault(index, output.prompt_logprobs)
                yield index, output
        except Exception as error:
            self.failure = error

    async def of_one(self) -> AsyncIterator[Any]:
        """The same where there is one prompt."""
        async for _, output in self:
            yield output


def _media_tokens(resolved: Resolved) -> dict[str, int] | None:
    """How many tokens of a prompt are images and audio, by kind, as vLLM's server tells it in ``usage``."""
    from vllm.entrypoints.openai.chat_completion.serving import _get_mm_token_counts

    return None if resolved.rendered is None else dict(_get_mm_token_counts(resolved.rendered))


async def _alone(output: Any) -> AsyncIterator[Any]:
    yield output


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Its result: vLLM writes it as a coroutine, though with the output at hand it waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("vLLM waits for something while it makes an answer")


def structured_outputs_of(body: OpenAIBody) -> Any:
    """The form that a body itself asks for, as vLLM's ``StructuredOutputsParams``; None: any.

    Raises:
        InvalidRequest: two forms at once.
    """
    from vllm.entrypoints.generate.base.protocol import ResponseFormat, structured_outputs_from_response_format
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import StructuredOutputsParams

    names = {"response_format", "structured_outputs"}
    fields = body.model_dump(by_alias=True, exclude_none=True, include=names)
    asked, response = fields.get("structured_outputs"), fields.get("response_format")
    try:
        return structured_outputs_from_response_format(
            StructuredOutputsParams(**asked) if asked else None, ResponseFormat(**response) if response else None
        )
    except (ValidationError, VLLMClientError) as error:
        raise InvalidRequest(str(error), param="response_format") from error


def check_parsers(args: VLLMArgs) -> None:
    """Refuse a parser that vLLM does not have, before anything slow is begun.

    Raises:
        StartError: names those that it has.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    asked = {
        "tool_call_parser": (args.tool_call_parser, ToolParserManager),
        "reasoning_parser": (args.reasoning_parser, ReasoningParserManager),
    }
    for setting, (name, manager) in asked.items():
        if name is not None and name not in manager.list_registered():
            raise StartError(f"{setting}: vLLM has no {name!r}; it has {', '.join(manager.list_registered())}")


def _first_of(error: ValidationError) -> InvalidRequest:
    """The first complaint of vLLM's own models."""
    first = error.errors(include_url=False, include_input=False)[0]
    inner = first.get("ctx", {}).get("error")
    path = str(first["loc"][0]) if first["loc"] else None  # behind it stand the branches of unions
    return InvalidRequest(first["msg"].removeprefix("Value error, "), param=getattr(inner, "parameter", None) or path)
