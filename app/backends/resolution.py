"""Bodies become what vLLM takes: prompts, chat templates and sampling settings.

All of it runs on the resolver's thread with a tokenizer of its own: a fast tokenizer that two
threads use at once fails with "Already borrowed".
"""

import contextlib
import copy
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from app.backends import grammar
from app.backends.args import VLLMArgs
from app.backends.conversation import Conversations
from app.backends.grammar import GrammarChecker
from app.backends.media import MediaRenderer
from app.backends.openai import Origin, RequestSide
from app.errors import InvalidRequest
from app.prompts import bounds
from app.prompts.media import Placeholders
from app.prompts.openai import ChatCompletionRequest, CommonFields, OpenAIBody, OpenAIPrompt, Work
from app.prompts.sampling import SamplingFields
from app.prompts.spec import GenerateRequest
from app.prompts.templates import load_request_format
from app.request import Resolved

logger = logging.getLogger(__name__)

COUNTED_CHARS = 2**19
"""A longer text is not tokenized when it cannot fit: its length in tokens is then a lower bound."""

OPENAI_FIELDS = frozenset(name for name in CommonFields.model_fields if "_" in name)
"""Those of OpenAI's routes whose names are no words of a sentence."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as token ids, with a placeholder for each image and audio.

    Attributes:
        ids: special tokens included.
        param: the field that it comes from.
        are_given: whether the ids are the caller's own.
        origin: what an OpenAI answer will be made from; None for a ``/generate`` body.
    """

    ids: list[int]
    param: str
    are_given: bool
    origin: Origin | None


class Resolution:
    """Turns bodies into ``Resolved``. Belongs to the resolver's thread.

    Args:
        args: what the backend is built from.
        model_config: vLLM's ``ModelConfig``.
        tokenizer: one that no other thread uses.

    Attributes:
        adapters: vLLM's requests for LoRA adapters that can be used, by name.

    Raises:
        StartError: the template is wrong, or was asked for and is not there.
    """

    def __init__(self, args: VLLMArgs, model_config: Any, tokenizer: Any) -> None:
        self.args = args
        self.tokenizer = tokenizer
        self.defaults: dict[str, Any] = dict(model_config.get_diff_sampling_param())
        self.format = load_request_format(args.request_format)
        self.adapters: dict[str, Any] = {}
        self.conversations = Conversations(self.format, tokenizer, model_config)
        self.conversations.prove(is_template_asked_for=args.is_template_asked_for)
        self._model_config = model_config
        self._vocab_size = int(model_config.get_vocab_size())

    def use_vllm_config(self, vllm_config: Any, renderer: MediaRenderer | None = None) -> None:
        """Take over the configuration of the built engine: it may have lowered the context.

        Args:
            vllm_config: of the engine.
            renderer: of a model that takes images or audio.
        """
        self._vllm_config = vllm_config
        self._renderer = renderer
        if renderer is not None:
            args, takes = self.args, renderer.limits
            self.conversations.placeholders = Placeholders(
                args.image_placeholder if "image" in takes else None,
                args.audio_placeholder if "audio" in takes else None,
            )
        self._model_config = vllm_config.model_config
        self._requests = RequestSide(vllm_config, self.tokenizer, self.args)

    def grammar_tokenizer(self) -> Any:
        """What the process that tries grammars out needs of the tokenizer."""
        return grammar.tokenizer_info(self.tokenizer, self._model_config)

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return int(self._model_config.max_model_len)

    def new_tokenizer(self) -> Any:
        """Another copy of the tokenizer, for another thread."""
        return copy.deepcopy(self.tokenizer)

    def resolve(self, body: Work) -> Resolved:
        """A body of text alone.

        Raises:
            InvalidRequest: says what is wrong with it.
        """
        return self.complete(body, self.prompt(body))

    def prompt(self, body: Work) -> TokenizedPrompt:
        """The first half: the prompt as token ids, truncated."""
        options = body.body if isinstance(body, OpenAIPrompt) else body
        if body.media and options.truncate_prompt_tokens is not None:
            raise InvalidRequest("cannot stand beside images or audio", param="truncate_prompt_tokens")
        if isinstance(body, OpenAIPrompt):
            return self._openai_prompt(body)
        ids = bounds.keep_last(self._prompt_ids(body), body.truncate_prompt_tokens)
        return TokenizedPrompt(ids, _prompt_param(body), body.prompt_token_ids is not None, None)

    def complete(self, body: Work, prompt: TokenizedPrompt, rendered: dict[str, Any] | None = None) -> Resolved:
        """The second half: bounds, and fresh sampling settings.

        Args:
            body: where both come from.
            prompt: the first half.
            rendered: the prompt with its images and audio; None: it has none.
        """
        ids = prompt.ids if rendered is None else rendered["prompt_token_ids"]
        self._check_ids(ids, prompt.param, are_given=prompt.are_given)
        if rendered is None and self._renderer is not None:
            self._renderer.check_text(ids, prompt.param)
        if isinstance(body, OpenAIPrompt):
            params, salt = self._openai_params(prompt.origin, len(ids)), body.body.cache_salt
        else:
            params, salt = self._sampling_params(body, len(ids)), None
        self._verify(params)
        size = 0 if rendered is None or self._renderer is None else self._renderer.size_bytes(rendered)
        adapter = self.adapters.get(body.model or "")
        return Resolved(ids, params, _effective(params), prompt.origin, salt, rendered, size, adapter)

    def _openai_params(self, origin: Origin | None, prompt_tokens: int) -> Any:
        assert origin is not None
        with _refusals():
            request = self._requests.adjust(origin.request, origin.template_arguments)
            return self._requests.sampling_params(request, prompt_tokens, self.max_model_len)

    def _openai_prompt(self, prompt: OpenAIPrompt) -> TokenizedPrompt:
        ids, origin = self._openai_ids(prompt, self._requests.request(prompt))
        ids = _truncated(ids, prompt.body, self.max_model_len - 1)
        return TokenizedPrompt(ids, prompt.param, isinstance(prompt.prompt, list), origin)

    def _check_ids(self, ids: list[int], param: str, *, are_given: bool) -> None:
        """A prompt must have tokens, leave room for one more, and its ids, where they are the caller's, be known."""
        if not ids:
            raise InvalidRequest("the prompt has no tokens", param=param)
        bounds.check_context(len(ids), self.max_model_len)
        if are_given:
            bounds.check_token_ids(ids, self._vocab_size, param)

    def _openai_ids(self, prompt: OpenAIPrompt, request: Any) -> tuple[list[int], Origin]:
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
        text, _ = self.conversations.text_of(body.conversation, self.conversations.arguments(body), _prompt_param(body))
        # A conversation that a template has rendered holds its special tokens already.
        return self._encode(text, body.truncate_prompt_tokens, add_special_tokens=self.conversations.is_plain)

    def _encode(self, text: str, keep: int | None, *, add_special_tokens: bool, keeps_head: bool = False) -> list[int]:
        """Token ids of a text, one BOS at most; of a far too long one only what ``keep`` may need."""
        longest = int(self.tokenizer.max_chars_per_token)
        fitting_chars = max(COUNTED_CHARS, self.max_model_len * longest)
        if len(text) > fitting_chars:
            if keep is None:
                bounds.check_context(-(-len(text) // longest), self.max_model_len, at_least=True)
            text = text[:fitting_chars] if keeps_head else text[-fitting_chars:]
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return bounds.one_bos(ids, self.tokenizer.bos_token_id)

    def _sampling_params(self, body: GenerateRequest, prompt_tokens: int) -> Any:
        """A fresh ``SamplingParams`` over the model's generation defaults, as vLLM's server makes it."""
        from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        values = {**self.defaults, **body.given()}
        fallback = {"max_tokens": self.defaults.get("max_tokens", self.args.default_max_tokens)}
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
            params.verify(config.model_config, config.speculative_config, None, self.tokenizer)
            validate_logits_processors_parameters(config.model_config.logits_processors, params)
            if params.bad_words:
                params.clone().update_from_tokenizer(self.tokenizer)

    def verify_grammar(self, resolved: Resolved, grammars: GrammarChecker | None) -> Resolved:
        """What vLLM itself would refuse of a grammar once the request is in the engine."""
        config, params = self._vllm_config, resolved.params
        arguments = (config.speculative_config, config.structured_outputs_config, self.tokenizer)
        with _refusals():
            params.verify(config.model_config, *arguments)
            if grammars is not None and grammar.has_bounded_strings(params.structured_outputs):
                params.structured_outputs = grammars.with_safe_strings(params.structured_outputs)
                params.verify(config.model_config, *arguments)
        return resolved


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
