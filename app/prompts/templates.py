"""How ``messages`` become text: the three values of ``request_format``, checked before any model is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.errors import StartError
from app.prompts.media import Placeholders
from app.prompts.spec import ChatMessage, plain_texts

MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """A resolved ``request_format``.

    Attributes:
        kind: ``plain`` joins texts, ``default`` is the model's own template, ``custom`` is ``template``.
        template: Jinja2 source, for ``custom`` only.
        source: what to call it in a message: the setting's value or the file's name.
    """

    kind: Literal["plain", "default", "custom"]
    template: str | None = None
    source: str = ""


def load_request_format(value: str) -> RequestFormat:
    """Resolve the setting ``request_format``.

    Raises:
        StartError: no such file, not UTF-8, or not a Jinja2 template; the message holds the reason.
    """
    if value in ("plain", "default-template"):
        return RequestFormat("plain" if value == "plain" else "default", source=value)
    if _is_inline(value):
        template, source = value, "the inline template"
    else:
        template, source = _read(Path(value).expanduser()), value
    _check_syntax(template, source)
    return RequestFormat("custom", template, source)


def _is_inline(value: str) -> bool:
    return any(mark in value for mark in ("{{", "{%", "\n"))


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise StartError(f"request_format: {path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartError(
            f"request_format: {path} is neither plain nor default-template, has no Jinja2 marks, "
            f"and as a template file cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise StartError(f"request_format: {path} is not UTF-8 text") from error


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox that a template is parsed in, with the extensions that chat templates use."""
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])


def _check_syntax(template: str, source: str) -> None:
    """Refuse what does not parse, and what could not show a message."""
    without_generation_marks = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    try:
        parsed = environment().parse(without_generation_marks)
    except jinja2.TemplateSyntaxError as error:
        raise StartError(
            f"request_format: {source} is not a Jinja2 template: line {error.lineno}: {error.message}"
        ) from error
    if "messages" not in jinja2.meta.find_undeclared_variables(parsed):
        raise StartError(f"request_format: {source} never uses `messages`, so every prompt would be the same")


def join_plain(messages: Sequence[ChatMessage], placeholders: Placeholders, param: str) -> str:
    """The text of ``request_format: plain``: parts of a message as they are, messages one space apart.

    Args:
        messages: the conversation.
        placeholders: what stands for an image or an audio.
        param: what to name in an error.

    Raises:
        InvalidRequest: other placeholders in the texts than there are images and audio.
    """
    return " ".join(filter(None, plain_texts(messages, placeholders, param)))
