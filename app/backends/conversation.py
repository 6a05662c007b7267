"""Conversations to text, by the chat template that ``request_format`` says, which runs in transformers' sandbox."""

import inspect
import logging
from typing import Any

from app.errors import InvalidRequest, StartError
from app.prompts.media import Placeholders
from app.prompts.spec import ChatMessage, GenerateRequest
from app.prompts.templates import RequestFormat, join_plain

logger = logging.getLogger(__name__)

NO_TEMPLATE = (
    "this model has no chat template: start the service with request_format=plain, or with a template file, "
    "or send `prompt` instead"
)
HELLO = [ChatMessage(role="user", content="Hello")]
HELLO_ARGUMENTS = {"add_generation_prompt": True, "continue_final_message": False}


class Conversations:
    """The request format at work. Belongs to the thread that the tokenizer belongs to.

    Args:
        request_format: the setting, resolved.
        tokenizer: of the model.
        model_config: vLLM's ``ModelConfig``.

    Attributes:
        placeholders: what stands for images and audio in plain text; known once the model's processor is.
    """

    def __init__(self, request_format: RequestFormat, tokenizer: Any, model_config: Any) -> None:
        self._format = request_format
        self._tokenizer = tokenizer
        self._model_config = model_config
        self.placeholders = Placeholders(None, None)
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self.is_plain = request_format.kind == "plain"
        self.is_possible = self.is_plain or self._find_template() is not None

    def _find_template(self) -> str | None:
        from vllm.renderers.hf import resolve_chat_template

        template: str | None = resolve_chat_template(
            self._tokenizer, self._format.template, None, model_config=self._model_config
        )
        return template

    def prove(self, *, is_template_asked_for: bool) -> None:
        """Render a conversation of one message, so that a broken template fails the start, not the first caller.

        Raises:
            StartError: the template is wrong, or was asked for and is not there.
        """
        if not self.is_possible:
            if is_template_asked_for:
                raise StartError(f"request_format: default-template was asked for, but {NO_TEMPLATE}")
            logger.warning(NO_TEMPLATE)
            return
        try:
            text, _ = self.text_of(HELLO, HELLO_ARGUMENTS, "messages")
        except InvalidRequest as error:
            raise StartError(
                f"request_format: {self._format.source} fails on a user's message: {error.message}"
            ) from error
        if not self._tokenizer.encode(text, add_special_tokens=self.is_plain):
            raise StartError(f"request_format: {self._format.source} renders a user's message to nothing")

    def text_of(
        self, messages: list[ChatMessage], arguments: dict[str, Any], param: str, tools: list[Any] | None = None
    ) -> tuple[str, list[Any]]:
        """A conversation as text, and as the template saw it.

        Args:
            messages: the conversation.
            arguments: the variables of the template.
            param: what to name in an error.
            tools: those that the model may use, as plain values.

        Raises:
            InvalidRequest: there is no template, or it refuses the conversation.
        """
        if self.is_plain:
            return join_plain(messages, self.placeholders, param), [message.for_vllm() for message in messages]
        if not self.is_possible:
            raise InvalidRequest(NO_TEMPLATE, param=param)
        try:
            return self._render(messages, arguments, tools)
        except InvalidRequest:
            raise
        except Exception as error:
            raise InvalidRequest(f"the chat template refuses this: {error}", param=param) from error

    def _render(
        self, messages: list[ChatMessage], arguments: dict[str, Any], tools: list[Any] | None
    ) -> tuple[str, list[Any]]:
        from vllm.renderers.chat_utils import parse_chat_messages
        from vllm.renderers.hf import resolve_chat_template_content_format, safe_apply_chat_template

        config, template = self._model_config, self._format.template
        content_format = resolve_chat_template_content_format(
            template, tools, "auto", self._tokenizer, model_config=config
        )
        conversation, _, _ = parse_chat_messages([message.for_vllm() for message in messages], config, content_format)
        text: str = safe_apply_chat_template(
            config, self._tokenizer, conversation, tools=tools, chat_template=template, tokenize=False, **arguments
        )
        return text, conversation

    def arguments(self, body: GenerateRequest) -> dict[str, Any]:
        """The variables of the template for a ``/generate`` body."""
        extra = body.chat_template_kwargs or {}
        self.check_variables(extra)
        goes_on = bool(body.continue_final_message)
        prompt = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
        return {"add_generation_prompt": prompt, "continue_final_message": goes_on, **extra}

    def check_variables(self, extra: dict[str, Any]) -> None:
        """The caller may not reach transformers' own arguments.

        Raises:
            InvalidRequest: names the one.
        """
        for name in extra:
            if name in self._reserved or name == "messages":
                raise InvalidRequest(f"{name} cannot be set here", param=f"chat_template_kwargs.{name}")

    def bos_repeats(self) -> tuple[int, int]:
        """How many BOS tokens a user's message and a text begin with, before those too many are dropped."""
        text, _ = self.text_of(HELLO, HELLO_ARGUMENTS, "messages")
        chat = self._tokenizer.encode(text, add_special_tokens=self.is_plain)
        return self._leading_bos(chat), self._leading_bos(self._tokenizer.encode("Hello", add_special_tokens=True))

    def _leading_bos(self, ids: list[int]) -> int:
        bos = self._tokenizer.bos_token_id
        return next((count for count, token in enumerate(ids) if bos is None or token != bos), len(ids))
