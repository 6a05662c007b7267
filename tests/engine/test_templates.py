"""Prompts and chat templates with a real tokenizer: what the model is given, to the token."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from app.errors import StartError
from app.prompts.spec import GenerateRequest
from app.request import Resolved
from tests.engine.inline import Inline
from tests.engine.models import variant
from tests.engine.resolution import ResolvingBackend, resolving

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

HELLO = [{"role": "user", "content": "Hello"}]
TALK = [
    {"role": "system", "content": "You are a bear."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A bear."},
    {"role": "user", "content": "Is that so?"},
]
OWN = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """transformers' own, as a reference."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def default(tiny_model: Path) -> AsyncIterator[ResolvingBackend]:
    async with resolving(tiny_model) as backend:
        yield backend


def templated(tokenizer: Any, messages: list[Any], **arguments: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, **{"add_generation_prompt": True, **arguments}, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


# --- the four forms under the model's own template ---


@pytest.mark.parametrize("messages", [HELLO, TALK], ids=["one", "several"])
async def test_messages_become_what_the_models_own_template_makes(
    default: ResolvingBackend, tokenizer: Any, messages: list[Any]
) -> None:
    assert await default.ids(messages=messages) == templated(tokenizer, messages)


async def test_text_parts_are_the_same_as_one_text(default: ResolvingBackend, tokenizer: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert await default.ids(messages=parts) == templated(tokenizer, HELLO)


async def test_without_the_generation_prompt_the_answers_head_is_missing(
    default: ResolvingBackend, tokenizer: Any
) -> None:
    ids = await default.ids(messages=TALK, add_generation_prompt=False)
    assert ids == templated(tokenizer, TALK, add_generation_prompt=False)
    assert ids != await default.ids(messages=TALK)


async def test_the_final_message_can_be_continued(default: ResolvingBackend, tokenizer: Any) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am"}]
    ids = await default.ids(messages=begun, continue_final_message=True)
    assert ids == templated(tokenizer, begun, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids).endswith("I am")


async def test_columns_are_a_system_and_a_user_message(default: ResolvingBackend, tokenizer: Any) -> None:
    ids = await default.ids(columns={"prefix_column": ["Be a bear."], "text_column": ["Who", " are you?"]})
    messages = [{"role": "system", "content": "Be a bear."}, {"role": "user", "content": "Who are you?"}]
    assert ids == templated(tokenizer, messages)
    assert await default.ids(columns={"text_column": ["Hello"]}) == templated(tokenizer, HELLO)


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant"])
async def test_a_message_alone_works_whatever_its_role(default: ResolvingBackend, tokenizer: Any, role: str) -> None:
    ids = await default.ids(messages=[{"role": role, "content": "Be a bear."}])
    assert "Be a bear." in tokenizer.decode(ids)


async def test_a_prompt_is_never_templated(default: ResolvingBackend, tokenizer: Any) -> None:
    assert await default.ids(prompt="Hello") == tokenizer.encode("Hello")
    assert await default.ids(prompt_token_ids=[1, 1, 5, 5]) == [1, 1, 5, 5]


@pytest.mark.parametrize("keep", [1, 3, 5, 10_000])
async def test_truncation_keeps_the_last_tokens(default: ResolvingBackend, tokenizer: Any, keep: int) -> None:
    text = "one two three four five six seven"
    assert await default.ids(prompt=text, truncate_prompt_tokens=keep) == tokenizer.encode(text)[-keep:]
    assert await default.ids(messages=TALK, truncate_prompt_tokens=keep) == templated(tokenizer, TALK)[-keep:]
    ids = list(range(100, 110))
    assert await default.ids(prompt_token_ids=ids, truncate_prompt_tokens=keep) == ids[-keep:]


async def test_a_text_that_is_far_too_long_fits_when_truncated(default: ResolvingBackend) -> None:
    assert len(await default.ids(prompt="bear " * 500_000, truncate_prompt_tokens=100)) == 100


# --- other formats ---


async def test_plain_joins_the_texts(tiny_model: Path, tokenizer: Any) -> None:
    async with resolving(tiny_model, request_format="plain") as backend:
        assert await backend.ids(messages=TALK) == tokenizer.encode("You are a bear. Who are you? A bear. Is that so?")
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
        assert await backend.ids(messages=parts) == tokenizer.encode("Hello")
        assert await backend.ids(columns={"text_column": ["Hello"]}) == tokenizer.encode("Hello")


async def test_a_template_replaces_the_models_own(tiny_model: Path, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    expected = tokenizer.encode("[user] Hello\n", add_special_tokens=False)
    for request_format in (OWN, str(file)):
        async with resolving(tiny_model, request_format=request_format) as backend:
            assert await backend.ids(messages=HELLO) == expected
            assert await backend.ids(columns={"text_column": ["Hello"]}) == expected


async def test_a_custom_template_does_not_change_the_tokenizers_own(tiny_model: Path, tokenizer: Any) -> None:
    async with resolving(tiny_model, request_format=OWN) as backend:
        for _ in range(3):
            await backend.ids(messages=TALK, chat_template_kwargs={"style": "x"})
        assert backend.resolution.tokenizer.chat_template == tokenizer.chat_template


async def test_the_engines_tokenizer_is_another_object(inline: Inline) -> None:
    theirs = inline.llm.get_tokenizer()
    assert theirs is not inline.tokenizer
    before = theirs.chat_template
    await inline.generate(messages=HELLO, max_tokens=1, chat_template_kwargs={"style": "x"})
    assert inline.llm.get_tokenizer().chat_template is before


# --- variables of the template ---


async def test_variables_of_the_caller_reach_the_template(tiny_model: Path, tokenizer: Any) -> None:
    template = OWN + "<{{ style }}|{{ options.a[1] if options }}|{{ missing is defined }}>"
    async with resolving(tiny_model, request_format=template) as backend:
        variables = {"style": "grand", "options": {"a": [1, 2]}}
        ids = await backend.ids(messages=HELLO, chat_template_kwargs=variables)
        assert tokenizer.decode(ids) == "[user] Hello\n<grand|2|False>"


@pytest.mark.parametrize(
    "name",
    [
        "tokenize",
        "chat_template",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "tools",
        "documents",
        "conversation",
        "add_generation_prompt",
        "continue_final_message",
    ],
)
async def test_transformers_own_arguments_are_refused(default: ResolvingBackend, name: str) -> None:
    error = await default.refusal(messages=HELLO, chat_template_kwargs={name: True})
    assert error.param == f"chat_template_kwargs.{name}"
    assert name in error.message


@pytest.mark.parametrize("name", ["messages", "self", "model_config", "tokenizer"])
async def test_names_that_rendering_itself_uses_do_no_harm(default: ResolvingBackend, name: str) -> None:
    before = await default.ids(messages=HELLO)
    assert (await default.refusal(messages=HELLO, chat_template_kwargs={name: []})).param is not None
    assert await default.ids(messages=HELLO) == before


# --- templates that fail ---


async def test_a_template_that_raises_gives_its_reason(tiny_model: Path) -> None:
    template = "{% if messages|length > 2 %}{{ raise_exception('two messages at most') }}{% endif %}" + OWN
    async with resolving(tiny_model, request_format=template) as backend:
        error = await backend.refusal(messages=TALK)
        assert (error.code, error.param) == ("invalid_request", "messages")
        assert "two messages at most" in error.message
        await backend.ids(messages=HELLO)


@pytest.mark.parametrize(
    ("request_format", "reason"),
    [
        ("{{ raise_exception('never') }}{{ messages }}", "never"),
        ("{% for message in messages %}", "Jinja2"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[7].content }}", "fails"),
        ("{% if messages %}{% endif %}", "nothing"),
        ("{{ bos_token }} the same for all", "messages"),
        ("/no/such/template.jinja", "No such file"),
        ("default_template", "neither plain nor default-template"),
    ],
)
async def test_a_wrong_template_is_refused_at_start_with_the_reason(
    tiny_model: Path, request_format: str, reason: str
) -> None:
    with pytest.raises(StartError, match=reason) as caught:
        async with resolving(tiny_model, request_format=request_format):
            pass
    assert str(caught.value).startswith("request_format: ")
    assert "\n" not in str(caught.value)


# --- a model without a template ---


@pytest.fixture(scope="module")
def bare_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant(tiny_model, tmp_path_factory.mktemp("bare") / "model", template="")


async def test_a_model_without_a_template_serves_prompts_alone(bare_model: Path, tokenizer: Any) -> None:
    async with resolving(bare_model) as backend:
        assert await backend.ids(prompt="Hello") == tokenizer.encode("Hello")
        for form, value in {"messages": HELLO, "columns": {"text_column": ["Hello"]}}.items():
            error = await backend.refusal(**{form: value})
            assert error.param == form
            assert "plain" in error.message
            assert "template file" in error.message


async def test_a_template_that_was_asked_for_and_is_not_there_fails_the_start(bare_model: Path) -> None:
    with pytest.raises(StartError, match=r"default-template.*plain.*template file"):
        async with resolving(bare_model, request_format="default-template"):
            pass


@pytest.mark.parametrize("request_format", ["plain", OWN])
async def test_a_model_without_a_template_takes_messages_in_another_format(
    bare_model: Path, request_format: str
) -> None:
    async with resolving(bare_model, request_format=request_format) as backend:
        assert await backend.ids(messages=HELLO)


# --- the beginning of the sequence ---

BOS = "<|endoftext|>"
BOS_ID = 0
BOS_TEMPLATE = "{{ bos_token }}" + OWN


def _writes_bos(tokenizer: dict[str, Any]) -> None:
    special, text = {"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [BOS_ID], "tokens": [BOS]}},
    }


@pytest.fixture(scope="module")
def bos_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template writes a BOS, and its tokenizer adds one."""
    return variant(
        tiny_model,
        tmp_path_factory.mktemp("bos") / "model",
        template=BOS_TEMPLATE,
        tokenizer=_writes_bos,
        tokenizer_config={"bos_token": BOS, "tokenizer_class": "PreTrainedTokenizerFast"},
    )


@pytest.mark.parametrize("request_format", ["default-template", "plain", OWN, BOS_TEMPLATE, "file"])
async def test_there_is_one_bos_at_most_in_every_format(bos_model: Path, tmp_path: Path, request_format: str) -> None:
    if request_format == "file":
        file = tmp_path / "template.jinja"
        file.write_text(BOS_TEMPLATE)
        request_format = str(file)
    async with resolving(bos_model, request_format=request_format) as backend:
        assert backend.resolution.tokenizer.encode("Hello")[:1] == [BOS_ID]
        expected = 0 if request_format == OWN else 1
        bodies: list[dict[str, Any]] = [{"messages": TALK}, {"columns": {"text_column": ["Hello"]}}]
        for body in bodies:
            assert (await backend.ids(**body))[:2].count(BOS_ID) == expected
        for text in ("Hello", BOS + "Hello", BOS + BOS + "Hello"):
            ids = await backend.ids(prompt=text)
            assert ids == [BOS_ID, *backend.resolution.tokenizer.encode("Hello", add_special_tokens=False)]
        assert await backend.ids(prompt_token_ids=[BOS_ID, BOS_ID, 5]) == [BOS_ID, BOS_ID, 5]


async def test_the_engine_adds_no_second_bos(inline: Inline, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine ran is what resolution made."""
    seen: list[list[int]] = []
    generate = inline.llm.generate

    def record(*args: Any, **kwargs: Any) -> Any:
        outputs = generate(*args, **kwargs)
        seen.extend(list(output.prompt_token_ids) for output in outputs)
        return outputs

    monkeypatch.setattr(inline.llm, "generate", record)
    resolved = [await inline.resolve(prompt="Hello"), await inline.resolve(messages=TALK)]
    await inline.batch([{"prompt": "Hello"}, {"messages": TALK}], max_tokens=1)
    assert seen == [item.prompt_token_ids for item in resolved]


# --- two threads, two tokenizers ---


async def test_two_thousand_resolutions_while_windows_run_never_collide(inline: Inline) -> None:
    """A fast tokenizer that two threads share fails with "Already borrowed"."""
    stop = asyncio.Event()

    async def windows() -> int:
        count = 0
        while not stop.is_set():
            texts = [{"prompt": f"{number} bears", "max_tokens": 20, "stop": ["zzz"]} for number in range(16)]
            rows = await inline.batch(texts, logprobs=2, bad_words=["wolf"])
            assert {row["status"] for row in rows} == {200}
            count += 1
        return count

    work = asyncio.create_task(windows())
    body = {"messages": TALK, "truncate_prompt_tokens": 12, "bad_words": ["bear"]}
    bodies = [GenerateRequest.model_validate({**body, "max_tokens": 1 + number}) for number in range(20)]
    for _ in range(100):
        resolved = await inline.backend.resolve(bodies)
        assert all(isinstance(item, Resolved) for item in resolved)
    stop.set()
    assert await work > 1
