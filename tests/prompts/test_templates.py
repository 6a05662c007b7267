"""``request_format``: what each value means, and why a wrong one is refused."""

from pathlib import Path
from typing import Any

import jinja2
import pytest

from app.errors import StartError
from app.prompts.media import Placeholders
from app.prompts.spec import ChatMessage
from app.prompts.templates import MAX_TEMPLATE_BYTES, RequestFormat, environment, join_plain, load_request_format

GOOD = "{% for m in messages %}{{ m.content }}{% endfor %}"


def message(content: Any, role: str = "user") -> ChatMessage:
    return ChatMessage.model_validate({"role": role, "content": content})


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_the_words_are_resolved() -> None:
    assert load_request_format("plain") == RequestFormat("plain", None, "plain")
    assert load_request_format("default-template") == RequestFormat("default", None, "default-template")


@pytest.mark.parametrize("template", [GOOD, "{{ messages }}", "x\n{{ messages }}"])
def test_an_inline_template_is_known_by_its_marks(template: str) -> None:
    assert load_request_format(template) == RequestFormat("custom", template, "the inline template")


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("ü" + GOOD)

    assert load_request_format(str(file)) == RequestFormat("custom", "ü" + GOOD, str(file))


def test_a_file_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "chat.jinja").write_text(GOOD)

    assert load_request_format("~/chat.jinja").template == GOOD


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no-such-file.jinja", "neither plain nor default-template.*No such file"),
        ("Plain", "neither plain nor default-template"),
        ("/", "cannot be read: Is a directory"),
        ("{% for %}", "not a Jinja2 template: line 1"),
        ("line\n{{ messages", "not a Jinja2 template: line 2"),
        ("{{ message }}", "never uses `messages`"),
        ("{% set messages = [] %}{{ messages }}", "never uses `messages`"),
        ("one\ntwo", "never uses `messages`"),
    ],
)
def test_a_wrong_format_is_refused_with_the_reason(value: str, reason: str) -> None:
    with pytest.raises(StartError, match=rf"request_format: .*{reason}") as caught:
        load_request_format(value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_templates_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(StartError, match="not UTF-8"):
        load_request_format(str(file))
    file.write_text(" " * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(StartError, match="larger than"):
        load_request_format(str(file))
    file.write_text("{{ oops")
    with pytest.raises(StartError, match=r"chat\.jinja is not a Jinja2 template"):
        load_request_format(str(file))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if not m %}{% break %}{% endif %}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}",
        "{%- if messages[0]['role'] == 'system' -%}{% set ns = namespace(x=1) %}{{ messages | tojson }}{%- endif -%}",
    ],
)
def test_what_chat_templates_use_is_understood(template: str) -> None:
    assert load_request_format(template).kind == "custom"


@pytest.mark.parametrize("expression", ["messages.append(1)", "messages.__class__.__mro__", "''.__class__.__base__"])
def test_a_template_reaches_nothing_beyond_its_variables(expression: str) -> None:
    template = environment().from_string("{{ " + expression + ".x }}{{ messages }}")

    with pytest.raises(jinja2.exceptions.SecurityError):
        template.render(messages=[])


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([message("Hi")], "Hi"),
        ([message("Be kind.", "system"), message("Hi")], "Be kind. Hi"),
        ([message(parts("a", "b")), message("c")], "ab c"),
        ([message("a"), message(None, "assistant"), message(""), message("b")], "a b"),
        ([message(" a "), message("b\n")], " a  b\n"),
        ([message(None)], ""),
        ([], ""),
    ],
)
def test_plain_joins_the_texts_in_order(messages: list[ChatMessage], expected: str) -> None:
    assert join_plain(messages, Placeholders("<image>", "<|audio|>"), "messages") == expected
