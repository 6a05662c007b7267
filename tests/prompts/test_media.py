"""Images and audio on the wire: parts, rows, and the placeholders of ``plain`` text."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.validation import generate_body
from app.errors import InvalidRequest
from app.prompts.media import MediaPart, Placeholders
from app.prompts.spec import ChatMessage, GenerateRequest, media_of, plain_texts

IMAGE, AUDIO = "data:image/png;base64,iVBO", "data:audio/wav;base64,UklG"
MARKS = Placeholders("<image>", "<|audio|>")


def image_part(url: str = IMAGE) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def audio_part(data: str = "UklG") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def message(*parts: Any, role: str = "user") -> ChatMessage:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return ChatMessage.model_validate({"role": role, "content": content})


def row(**columns: Any) -> GenerateRequest:
    return generate_body({"columns": columns})


def refused(body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        generate_body(body)
    return caught.value


# --- parts of messages ---


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (image_part("http://a/b"), MediaPart("image", "http://a/b", "messages.0.content.1.image_url.url")),
        ({"type": "image_url", "image_url": IMAGE}, MediaPart("image", IMAGE, "messages.0.content.1.image_url")),
        (
            {"type": "image_url", "image_url": {"url": IMAGE, "detail": "high"}},
            MediaPart("image", IMAGE, "messages.0.content.1.image_url.url"),
        ),
        (audio_part("UklG"), MediaPart("audio", "UklG", "messages.0.content.1.input_audio.data")),
        (
            {"type": "input_audio", "input_audio": {"data": "UklG"}},
            MediaPart("audio", "UklG", "messages.0.content.1.input_audio.data"),
        ),
        (
            {"type": "audio_url", "audio_url": {"url": AUDIO}},
            MediaPart("audio", AUDIO, "messages.0.content.1.audio_url.url"),
        ),
        ({"type": "audio_url", "audio_url": AUDIO}, MediaPart("audio", AUDIO, "messages.0.content.1.audio_url")),
    ],
    ids=["image", "image short", "image detail", "audio", "audio without format", "audio url", "audio url short"],
)
def test_a_part_says_where_its_media_come_from(part: Any, expected: MediaPart) -> None:
    body = generate_body({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})

    assert body.media == [expected]
    assert body.conversation[0].text_parts == ["a"]


def test_media_come_in_the_order_of_the_conversation() -> None:
    messages = [message(image_part("a:"), "x", audio_part("b")), message("y"), message(image_part("c:"))]

    assert [(part.source, part.param[:20]) for part in media_of(messages, "messages")] == [
        ("a:", "messages.0.content.0"),
        ("b", "messages.0.content.2"),
        ("c:", "messages.2.content.0"),
    ]


@pytest.mark.parametrize("content", ["a", None, [], [{"type": "text", "text": "a"}]], ids=str)
def test_a_message_of_text_has_no_media(content: Any) -> None:
    assert ChatMessage.model_validate({"role": "user", "content": content}).media("messages.0") == []


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt_token_ids": [1]}], ids=str)
def test_other_prompts_have_no_media_and_no_conversation(body: Any) -> None:
    assert (generate_body(body).media, generate_body(body).conversation) == ([], [])


PLACE = "messages.0.content.0"


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        ({"type": "video_url", "video_url": {"url": "x"}}, "type", "'video_url'"),
        ({"type": "image_embeds", "image_embeds": "x"}, "type", "input_audio, audio_url"),
        ({"type": "x" * 10**6}, "type", "not served"),
        ({"type": "image_url"}, "image_url", "is needed"),
        ({"type": "image_url", "image_url": None}, "image_url", "JSON object"),
        ({"type": "image_url", "image_url": 5}, "image_url", "JSON object"),
        ({"type": "image_url", "image_url": ""}, "image_url", "at least 1"),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "is needed"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url.url", "at least 1"),
        ({"type": "image_url", "image_url": {"url": None}}, "image_url.url", "must be a string"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}, "image_url.detail", "'auto'"),
        ({"type": "image_url", "image_url": {"url": "x", "urls": 1}}, "image_url.urls", "did you mean url"),
        ({"type": "image_url", "image_url": "x", "uuid": "1"}, "uuid", "not kept"),
        ({"type": "image_url", "image_url": "x", "text": "a"}, "text", "unknown field"),
        ({"type": "input_audio", "input_audio": "UklG"}, "input_audio", "JSON object"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data", "is needed"),
        ({"type": "input_audio", "input_audio": {"data": "a", "format": 5}}, "input_audio.format", "string"),
        ({"type": "audio_url", "audio_url": {"data": "a"}}, "audio_url.data", "unknown field"),
        ({"type": "audio_url", "audio_url": "x", "uuid": "1"}, "uuid", "not kept"),
        ({"image_url": "x"}, "type", "is needed"),
        ({"type": 5, "text": "x"}, "type", "'text'"),
        ("a", "", "JSON object"),
    ],
)
def test_a_wrong_part_is_refused_by_the_path_of_what_is_wrong(part: Any, param: str, says: str) -> None:
    error = refused({"messages": [{"role": "user", "content": [part]}]})

    assert error.param == f"{PLACE}.{param}".rstrip(".")
    assert says in error.message


def test_vllm_gets_a_part_without_data_for_which_it_fetches_nothing() -> None:
    told = message("a", image_part(), audio_part(), {"type": "audio_url", "audio_url": AUDIO}).for_vllm()

    assert told == {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": None, "uuid": "0"},
            {"type": "audio_url", "audio_url": None, "uuid": "0"},
            {"type": "audio_url", "audio_url": None, "uuid": "0"},
        ],
    }


def test_vllm_gets_a_message_of_text_as_it_is() -> None:
    plain = ChatMessage(role="assistant", content=None, tool_calls=[{"id": "1"}])

    assert plain.for_vllm() == {"role": "assistant", "tool_calls": [{"id": "1"}]}
    assert message("a", role="system").for_vllm() == {"role": "system", "content": [{"type": "text", "text": "a"}]}


# --- rows ---


def parts_of(body: GenerateRequest) -> list[str]:
    """The user's message in short."""
    content = body.conversation[-1].content
    assert isinstance(content, list)
    sources = iter(body.conversation[-1].media("m"))
    return [next(sources).source if part.type != "text" else part.text for part in content]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"text_column": ["t"], "image_column": ["i:"]}, ["t", "i:"]),
        ({"text_column": ["t"], "audio_column": ["a"]}, ["t", "a"]),
        ({"text_column": ["t"], "image_column": ["i:"], "audio_column": ["a"]}, ["t", "i:", "a"]),
        ({"text_column": ["t", "u"], "image_column": ["i:", "j:"]}, ["t", "i:", "u", "j:"]),
        ({"text_column": ["t", "u"], "image_column": ["i:"], "audio_column": ["a", "b"]}, ["t", "i:", "a", "u", "b"]),
        ({"text_column": ["", "u"], "image_column": ["i:", "j:"]}, ["i:", "u", "j:"]),
        ({"image_column": ["i:", "j:"]}, ["i:", "j:"]),
        ({"audio_column": ["a"]}, ["a"]),
    ],
    ids=str,
)
def test_the_items_of_a_row_take_turns(columns: dict[str, Any], expected: list[str]) -> None:
    assert parts_of(row(**columns)) == expected


def test_a_rows_media_have_the_order_of_its_message_and_the_paths_of_its_columns() -> None:
    body = row(
        prefix_column=["p"], text_column=["t"], image_column=["i:", {"image": "j:"}], audio_column=[{"audio": "a"}]
    )

    assert body.media == [
        MediaPart("image", "i:", "columns.image_column.0"),
        MediaPart("audio", "a", "columns.audio_column.0.audio"),
        MediaPart("image", "j:", "columns.image_column.1.image"),
    ]
    assert [part.source for part in media_of(body.conversation, "m")] == [part.source for part in body.media]
    assert body.conversation[0].content == "p"


@given(st.lists(st.sampled_from(["t", ""])), st.integers(0, 5), st.integers(0, 5))
def test_a_rows_media_and_its_message_agree_whatever_it_holds(texts: list[str], images: int, audio: int) -> None:
    if not any(texts) and not images and not audio:
        return
    columns = {
        "text_column": texts,
        "image_column": [f"i{n}:" for n in range(images)],
        "audio_column": [f"a{n}" for n in range(audio)],
    }
    body = row(**columns)

    assert [part.source for part in media_of(body.conversation, "m")] == [part.source for part in body.media]
    assert len(body.media) == images + audio
    assert sum(len(part) for part in body.conversation[0].text_parts) == len("".join(texts))


def test_what_guidellm_writes_into_a_row_is_taken() -> None:
    body = row(
        text_column=["t"],
        image_column=[{"type": "image_base64", "image": IMAGE, "image_pixels": 9, "image_bytes": None}],
        audio_column=[
            {"type": "audio_file", "audio": "UklG", "format": "wav", "mimetype": "audio/wav", "file_name": "a"}
        ],
    )

    assert [part.source for part in body.media] == [IMAGE, "UklG"]


@pytest.mark.parametrize(
    ("columns", "param"),
    [
        ({"image_column": [5]}, "image_column.0"),
        ({"image_column": [None]}, "image_column.0"),
        ({"image_column": [""]}, "image_column.0"),
        ({"image_column": ["x:", {}]}, "image_column.1.image"),
        ({"image_column": [{"image": ""}]}, "image_column.0.image"),
        ({"image_column": "x:"}, "image_column"),
        ({"audio_column": [{"audio": 5}]}, "audio_column.0.audio"),
        ({"audio_column": [["a"]]}, "audio_column.0"),
        ({"video_column": ["a"]}, "video_column"),
    ],
    ids=str,
)
def test_a_wrong_item_is_refused_by_its_path(columns: dict[str, Any], param: str) -> None:
    assert refused({"columns": {"text_column": ["t"], **columns}}).param == f"columns.{param}"


# --- placeholders ---


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([message("a")], ["a"]),
        ([message("a", image_part())], ["<image>\na"]),
        ([message(image_part(), "a", image_part())], ["<image>\n<image>\na"]),
        ([message(audio_part(), "a", image_part(), "b")], ["<image>\n<|audio|>\nab"]),
        ([message(image_part())], ["<image>\n"]),
        ([message("s", role="system"), message("a", image_part())], ["s", "<image>\na"]),
        ([message("a", image_part()), message("b", audio_part())], ["<image>\na", "<|audio|>\nb"]),
        ([message("a <image> b", image_part())], ["a <image> b"]),
        ([message("<image><image>"), message(image_part(), image_part())], ["<image><image>", ""]),
        ([message("<image>", image_part(), audio_part())], ["<|audio|>\n<image>"]),
    ],
)
def test_placeholders_stand_where_the_caller_put_them_or_before_the_text(
    messages: list[ChatMessage], expected: list[str]
) -> None:
    assert plain_texts(messages, MARKS, "messages") == expected


@pytest.mark.parametrize(
    ("parts", "numbers"),
    [
        (("<image>",), ("1", "0")),
        (("<image><image> a", image_part()), ("2", "1")),
        (("<image>", image_part(), image_part()), ("1", "2")),
        (("<|audio|><|audio|>", audio_part()), ("2", "1")),
        (("<|audio|>", image_part()), ("1", "0")),
    ],
    ids=["none", "more", "fewer", "audio", "other kind"],
)
def test_placeholders_that_do_not_match_the_media_are_refused_with_both_numbers(
    parts: tuple[Any, ...], numbers: tuple[str, str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plain_texts([message(*parts)], MARKS, "messages")

    assert caught.value.param == "messages"
    assert [word for word in caught.value.message.split() if word.isdigit()] == list(numbers)


def test_the_text_of_a_model_that_takes_no_media_may_hold_what_would_be_a_placeholder() -> None:
    text = "what does <image> mean in HTML, and <|audio|>?"

    assert plain_texts([message(text)], Placeholders(None, None), "messages") == [text]


@given(st.lists(st.lists(st.sampled_from(["t", "image", "audio"]), max_size=6), max_size=4))
def test_after_placing_there_are_as_many_placeholders_as_media(shape: list[list[str]]) -> None:
    made = {"t": "text", "image": image_part(), "audio": audio_part()}
    messages = [message(*(made[kind] for kind in kinds)) for kinds in shape]

    texts = "".join(plain_texts(messages, MARKS, "messages"))

    kinds = [part.modality for part in media_of(messages, "messages")]
    assert (texts.count("<image>"), texts.count("<|audio|>")) == (kinds.count("image"), kinds.count("audio"))
