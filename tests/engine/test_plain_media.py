"""``request_format: plain`` with images and audio: where their placeholders stand, and how many there may be."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine import models
from tests.engine.resolution import ResolvingBackend, resolving
from tests.engine.test_media import audio_part, image_part, tone, user
from tests.media.support import base64_of, picture, uri

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="function")]

IMAGE, SOUND = image_part(picture(8, 8)), audio_part(tone(440))
MARKS = {"image": "<image>", "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
MODELS = {"image": models.tiny_image_model, "audio": models.tiny_audio_model}
PARTS = {"image": IMAGE, "audio": SOUND}
COLUMNS: dict[str, dict[str, Any]] = {
    "image": {"text_column": ["What?"], "image_column": [uri(picture(8, 8))]},
    "audio": {"text_column": ["What?"], "audio_column": [base64_of(tone(440))]},
}


def plain(kind: str, placeholder: str | None = None) -> Any:
    return resolving(MODELS[kind](), request_format="plain", **{f"{kind}_placeholder": placeholder or MARKS[kind]})


async def text(backend: ResolvingBackend, **body: Any) -> str:
    """The prompt without what an image or audio became, but for one placeholder each."""
    resolved = await backend.resolved(**body)
    tokenizer, renderer = backend.resolution.tokenizer, backend._renderer
    assert renderer is not None
    marks = {tokenizer.convert_tokens_to_ids(token) for token in ("<image>", "<|AUDIO|>")}
    ids = [
        token
        for before, token in zip([None, *resolved.prompt_token_ids], resolved.prompt_token_ids, strict=False)
        if token not in marks or before != token
    ]
    return str(tokenizer.decode(ids))


@pytest.mark.parametrize("kind", MODELS)
async def test_placeholders_stand_before_the_text_or_where_the_text_has_them(kind: str) -> None:
    part, mark = PARTS[kind], MARKS[kind]
    async with plain(kind) as backend:
        added = await text(backend, messages=user("What?", part))
        placed = await text(backend, messages=user(f"Look: {mark} What?", part))
        row = await text(backend, columns=COLUMNS[kind])
        assert backend._warnings == []

    core = {"image": "<image>", "audio": "<|AUDIO|>"}[kind]
    assert added.index(core) < added.index("What?")
    assert added == row
    assert placed.index("Look:") < placed.index(core) < placed.index("What?")


@pytest.mark.parametrize("kind", MODELS)
async def test_more_or_fewer_placeholders_than_parts_are_refused_with_both_numbers(kind: str) -> None:
    part, mark = PARTS[kind], MARKS[kind]
    async with plain(kind) as backend:
        for content in ((f"{mark}{mark} What?", part), (f"{mark} What?", part, part), (f"{mark} What?",)):
            error = await backend.refusal(messages=user(*content))
            assert "placeholders" in error.message
            assert error.param is not None
            assert error.param.startswith("messages")


async def test_a_placeholder_that_the_model_does_not_know_is_told_of_at_start() -> None:
    async with plain("image", "<img>") as backend:
        (warning,) = backend._warnings
        assert "image_placeholder" in warning
        assert "'<img>'" in warning
        assert (await backend.refusal(messages=user("What?", IMAGE))).status == 400


async def test_a_text_model_is_not_searched_for_placeholders(tiny_model: Path) -> None:
    async with resolving(tiny_model, request_format="plain") as backend:
        assert (await backend.resolved(messages=user("An <image> and an <|audio|>"))).prompt_token_ids
        assert "no image" in (await backend.refusal(messages=user("What?", IMAGE))).message
