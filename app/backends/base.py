"""What the vLLM backends share: prompts, chat templates and sampling settings become what vLLM takes.

Everything here runs on the resolver's thread with a tokenizer of its own: a fast tokenizer that two
threads use at once fails with "Already borrowed".
"""

import asyncio
import contextlib
import copy
import logging
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from app.backends import grammar
from app.backends.args import BackendArgs, VLLMOfflineArgs
from app.backends.conversation import Conversations
from app.backends.grammar import GrammarChecker
from app.backends.openai import AnswerSide, Origin, RequestSide, structured_outputs_of
from app.backends.registry import Backend
from app.errors import InvalidRequest, ServiceError, StartError
from app.prompts import bounds
from app.prompts.openai import ChatCompletionRequest, CommonFields, OpenAIBody, OpenAIPrompt, Work
from app.prompts.sampling import SamplingFields
from app.prompts.spec import GenerateRequest
from app.prompts.templates import RequestFormat, load_request_format
from app.request import Answer, AnswerHead, Resolved

logger = logging.getLogger(__name__)

COUNTED_CHARS = 2**19
"""A longer text is not tokenized when it cannot fit: its length in tokens is then a lower bound."""

OPENAI_FIELDS = frozenset(name for name in CommonFields.model_fields if "_" in name)
"""Those of OpenAI's routes whose names are no words of a sentence."""


class VLLMBackendBase(Backend):
    """Resolution for backends on vLLM.

    A subclass calls ``_prepare_resolution`` from its ``_open`` once vLLM's configuration is there.
    """

    def __init__(self, args: BackendArgs) -> None:
        super().__init__(args)
        self._model_config: Any = None
        self._vllm_config: Any = None
        self._tokenizer: Any = None
        self._format = RequestFormat("default")
        self._defaults: dict[str, Any] = {}
        self._grammars: GrammarChecker | None = None

    @abstractmethod
    def _get_tokenizer(self) -> Any:
        """The tokenizer of the served model; a copy of it is used here."""

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return int(self._model_config.max_model_len)

    def _prepare_resolution(self, model_config: Any) -> None:
        """Load the request format and try it on a conversation.

        Args:
            model_config: vLLM's ``ModelConfig``.

        Raises:
            StartError: the template is wrong, or was asked for and is not there.
        """
        self._model_config = model_config
        self._tokenizer = copy.deepcopy(self._get_tokenizer())
        if self._tokenizer is None:
            raise StartError("vllm_config: skip_tokenizer_init leaves the service without a tokenizer")
        self._vocab_size = int(model_config.get_vocab_size())
        self._defaults = dict(model_config.get_diff_sampling_param())
        self._format = load_request_format(self.args.request_format)
        self.conversations = Conversations(self._format, self._tokenizer, model_config)
        self.conversations.prove(is_template_asked_for=self.args.is_template_asked_for)

    def _prepare_grammars(self, structured_outputs: dict[str, Any]) -> None:
        """Start the process that tries grammars out, which warms up while the engine is built.

        Args:
            structured_outputs: what is set of vLLM's ``StructuredOutputsConfig``.
        """
        if grammar.needs_check(structured_outputs.get("backend", "auto")):
            is_compact = bool(structured_outputs.get("disable_any_whitespace"))
            self._grammars = GrammarChecker(disable_any_whitespace=is_compact)
            self._grammars.start(grammar.tokenizer_info(self._tokenizer, self._model_config))

    def _close_grammars(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _use_vllm_config(self, vllm_config: Any) -> None:
        """Take over the configuration of the built engine: it may have lowered the context."""
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config
        assert isinstance(self.args, VLLMOfflineArgs)
        self._requests = RequestSide(vllm_config, self._tokenizer, self.args)
        self._answers = AnswerSide(vllm_config, copy.deepcopy(self._tokenizer), self.args)

    async def resolve(self, bodies: Sequence[Work]) -> list[Resolved | ServiceError]:
        """As the base class does; what forms a text is tried out first, where it can do no harm."""
        if not any(isinstance(body, OpenAIPrompt) and body.body.forms_text for body in bodies):
            return await super().resolve(bodies)
        return list(await asyncio.gather(*(self._resolve_formed(body) for body in bodies)))

    async def _resolve_formed(self, body: Work) -> Resolved | ServiceError:
        """One body, whose grammar is compiled elsewhere before vLLM's code sees it; so is one that tools make."""
        try:
            if isinstance(body, OpenAIPrompt):
                asked = await self._on(self._resolver, structured_outputs_of, body.body)
                await self._try_grammar(asked, body.body.form_param)
            (resolved,) = await super().resolve([body])
            formed = isinstance(resolved, Resolved) and resolved.params.structured_outputs
            if not formed:
                return resolved
            await self._try_grammar(formed, "tools")
            return await self._on(self._resolver, self._verify_grammar, resolved)
        except ServiceError as error:
            return error

    async def _try_grammar(self, structured_outputs: Any, param: str) -> None:
        """Compile it in a process of its own.

        Args:
            structured_outputs: vLLM's ``StructuredOutputsParams``, or None.
            param: the field that asked for it.

        Raises:
            InvalidRequest: says what is wrong with it.
            NotReady: it could not be tried.
        """
        if structured_outputs is None or self._grammars is None:
            return
        try:
            kind, spec = await self._on(self._resolver, grammar.spec_of, structured_outputs)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from error
        if (wrong := await self._grammars.check(kind, spec)) is not None:
            raise InvalidRequest(wrong, param=param)

    def _verify_grammar(self, resolved: Resolved) -> Resolved:
        """What vLLM itself would refuse of a grammar once the request is in the engine."""
        config, params = self._vllm_config, resolved.params
        arguments = (config.speculative_config, config.structured_outputs_config, self._tokenizer)
        with _refusals():
            params.verify(config.model_config, *arguments)
            if self._grammars is not None and grammar.has_bounded_strings(params.structured_outputs):
                params.structured_outputs = self._grammars.with_safe_strings(params.structured_outputs)
                params.verify(config.model_config, *arguments)
        return resolved

    def _resolve(self, body: Work) -> Resolved:
        return self._resolve_openai(body) if isinstance(body, OpenAIPrompt) else self._resolve_generate(body)

    def _resolve_generate(self, body: GenerateRequest) -> Resolved:
        ids = bounds.keep_last(self._prompt_ids(body), body.truncate_prompt_tokens)
        self._check_ids(ids, _prompt_param(body), are_given=body.prompt_token_ids is not None)
        params = self._sampling_params(body, len(ids))
        self._verify(params)
        return Resolved(ids, params, _effective(params))

    def _check_ids(self, ids: list[int], param: str, *, are_given: bool) -> None:
        """A prompt must have tokens, leave room for one more, and its ids, where they are the caller's, be known."""
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param=param)
        bounds.check_context(len(ids), self.max_model_len)
        if are_given:
            bounds.check_token_ids(ids, self._vocab_size, param)

    def _resolve_openai(self, prompt: OpenAIPrompt) -> Resolved:
        request = self._requests.request(prompt)
        ids, origin = self._openai_prompt(prompt, request)
        ids = _truncated(ids, prompt.body, self.max_model_len - 1)
        self._check_ids(ids, prompt.param, are_given=isinstance(prompt.prompt, list))
        with _refusals():
            request = self._requests.adjust(request, origin.template_arguments)
            params = self._requests.sampling_params(request, len(ids), self.max_model_len)
        self._verify(params)
        return Resolved(ids, params, _effective(params), origin, prompt.body.cache_salt)

    def _openai_prompt(self, prompt: OpenAIPrompt, request: Any) -> tuple[list[int], Origin]:
        """The ids of a prompt before it is truncated, and what its answer will be made from."""
        body = prompt.body
        if isinstance(prompt.prompt, list):
            return prompt.prompt, Origin(request, None, [], {})
        if isinstance(body, ChatCompletionRequest):
            self.conversations.check_variables(body.chat_template_kwargs or {})
            arguments = self._requests.template_arguments(request)
            tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
            text, conversation = self.conversations.text_of(body.messages, arguments, "messages", tools)
            origin, adds = Origin(request, text, conversation, arguments), self.conversations.is_plain
        else:
            origin, adds = Origin(request, str(prompt.prompt), [], {}), True
        adds = adds if body.add_special_tokens is None else body.add_special_tokens
        keeps_head = body.truncation_side == "right"
        keep = body.truncate_prompt_tokens
        ids = self._encode(str(origin.text), keep, add_special_tokens=adds, keeps_head=keeps_head)
        return ids, origin

    def _prompt_ids(self, body: GenerateRequest) -> list[int]:
        if body.prompt_token_ids is not None:
            return body.prompt_token_ids
        if body.prompt is not None:
            return self._encode(body.prompt, body.truncate_prompt_tokens, add_special_tokens=True)
        messages = body.messages or (body.columns.messages() if body.columns else [])
        text, _ = self.conversations.text_of(messages, self.conversations.arguments(body), _prompt_param(body))
        # A conversation that a template has rendered holds its special tokens already.
        return self._encode(text, body.truncate_prompt_tokens, add_special_tokens=self.conversations.is_plain)

    def _encode(self, text: str, keep: int | None, *, add_special_tokens: bool, keeps_head: bool = False) -> list[int]:
        """Token ids of a text, one BOS at most; of a far too long one only what ``keep`` may need."""
        longest = int(self._tokenizer.max_chars_per_token)
        fitting_chars = max(COUNTED_CHARS, self.max_model_len * longest)
        if len(text) > fitting_chars:
            if keep is None:
                bounds.check_context(-(-len(text) // longest), self.max_model_len, at_least=True)
            text = text[:fitting_chars] if keeps_head else text[-fitting_chars:]
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return bounds.one_bos(ids, self._tokenizer.bos_token_id)

    def _sampling_params(self, body: GenerateRequest, prompt_tokens: int) -> Any:
        """A fresh ``SamplingParams`` over the model's generation defaults, as vLLM's server makes it."""
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        values = {**self._defaults, **body.given()}
        fallback = {"max_tokens": self._defaults.get("max_tokens", self.args.default_max_tokens)}
        values["max_tokens"] = get_max_tokens(self.max_model_len, body.max_tokens, prompt_tokens, fallback)
        if body.min_tokens is not None and body.min_tokens > values["max_tokens"]:
            raise InvalidRequest(
                f"min_tokens is {body.min_tokens}, but only {values['max_tokens']} tokens can be generated",
                param="min_tokens",
            )
        with _refusals():
            params = SamplingParams.from_optional(**values, output_kind=RequestOutputKind.FINAL_ONLY)
        params.flat_logprobs = True  # a few lists instead of an object a token, for the garbage collector to walk
        return params

    def _verify(self, params: Any) -> None:
        """What vLLM itself would refuse once the request is in the engine; grammars have their own turn."""
        from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

        config = self._vllm_config
        reasoning = config.reasoning_config
        if params.thinking_token_budget is not None and (reasoning is None or not reasoning.enabled):
            raise InvalidRequest("needs reasoning_config in vllm_config", param="thinking_token_budget")
        with _refusals():
            params.verify(config.model_config, config.speculative_config, None, self._tokenizer)
            validate_logits_processors_parameters(config.model_config.logits_processors, params)
            if params.bad_words:
                params.clone().update_from_tokenizer(self._tokenizer)

    def _shape(self, answers: Sequence[Answer], head: AnswerHead) -> dict[str, Any]:
        return self._answers.answer([(answer.request.resolved, answer.generation.raw) for answer in answers], head)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What vLLM refuses, as this service's error."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (VLLMClientError, ValueError) as error:
        raise InvalidRequest(str(error), param=_param_of(error)) from error


def _truncated(ids: list[int], body: OpenAIBody, room: int) -> list[int]:
    """The ids that ``truncate_prompt_tokens`` leaves, where -1 is as many as there is room for."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    keep = room if keep == -1 else keep
    return ids[:keep] if body.truncation_side == "right" else ids[max(0, len(ids) - keep) :]


def _prompt_param(body: GenerateRequest) -> str:
    return next(
        form for form in ("prompt", "prompt_token_ids", "messages", "columns") if getattr(body, form) is not None
    )


def _param_of(error: Exception) -> str | None:
    """The field that vLLM complains of: it names it, or begins its message with it, or mentions it."""
    named = getattr(error, "parameter", None)
    words = re.findall(r"[a-z_]+", str(error))
    return next(
        (word for word in (named, *words) if word in SamplingFields.model_fields or word in OPENAI_FIELDS), named
    )


def _effective(params: Any) -> dict[str, Any]:
    """The settings in force, under vLLM's names, as plain JSON values."""
    values = {name: getattr(params, name) for name in SamplingFields.model_fields}
    if values["logit_bias"] is not None:
        values["logit_bias"] = {str(token): bias for token, bias in values["logit_bias"].items()}
    return values
