"""Images and audio become part of a prompt, by vLLM's own processor of the model, before a window is made of it.

So what is wrong with them is known in time, and the engine thread gets a prompt that is ready. All of it runs on
a thread of its own, with a tokenizer of its own.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.errors import InvalidRequest
from app.prompts.media import MediaPart, Modality

logger = logging.getLogger(__name__)

MODALITIES: tuple[Modality, ...] = ("image", "audio")
PROCESSOR_CACHE_GB = 0
"""vLLM's default of 4 GiB, in each of its processes, would hold every image that has come by."""


class MediaRenderer:
    """vLLM's renderer of a model that takes more than text.

    Args:
        vllm_config: of the engine.
        tokenizer: one that no other thread uses.

    Attributes:
        limits: how many items of each kind a prompt may hold; a kind that is not there is not taken.
    """

    def __init__(self, vllm_config: Any, tokenizer: Any) -> None:
        from vllm.renderers.registry import RENDERER_REGISTRY
        from vllm.tokenizers.registry import tokenizer_args_from_config

        mode, *_ = tokenizer_args_from_config(vllm_config.model_config)
        self._renderer = RENDERER_REGISTRY.load_renderer(mode, vllm_config, tokenizer)
        self._processor = self._renderer.get_mm_processor()
        allowed = self._processor.info.allowed_mm_limits
        self.limits: dict[Modality, int] = {name: allowed[name] for name in MODALITIES if allowed.get(name, 0) > 0}
        self._placeholders: dict[int, Modality] = {}
        # It says for each image that its threads are bound.
        logging.getLogger("vllm.v1.worker.cpu_worker").setLevel(logging.ERROR)

    @property
    def audio_rate_hz(self) -> float | None:
        """The sample rate of the model; None when it takes no audio."""
        rate = getattr(self._processor.info.get_data_parser(), "audio_resampler", None)
        return None if "audio" not in self.limits or rate is None else float(rate.target_sr)

    def warm_up(self) -> None:
        """Render one item of each kind: the first takes seconds, and shows which tokens stand for it."""
        for modality in self.limits:
            dummy = self._processor.get_dummy_mm_inputs({modality: 1})
            tokens = (_embedded(dummy) - {self._renderer.tokenizer.unk_token_id}) | self._mark(modality)
            self._placeholders.update(dict.fromkeys(tokens, modality))

    def _mark(self, modality: Modality) -> set[int]:
        """What the model's chat template writes for an item, where that is one token; some put others in its place."""
        from vllm.model_executor.model_loader import get_model_cls

        text = get_model_cls(self._renderer.model_config).get_placeholder_str(modality, 1)
        ids = self._renderer.tokenizer.encode(text, add_special_tokens=False) if text else []
        return set(ids) if len(ids) == 1 else set()

    def knows(self, modality: Modality, placeholder: str) -> bool:
        """Whether a text with this placeholder has a place for an item."""
        ids = self._renderer.tokenizer.encode(placeholder, add_special_tokens=False)
        return any(self._placeholders.get(token) == modality for token in ids)

    def check(self, parts: Sequence[MediaPart]) -> None:
        """Refuse what the model does not take, before anything is fetched.

        Raises:
            InvalidRequest: names the part.
        """
        seen: dict[Modality, int] = dict.fromkeys(MODALITIES, 0)
        for part in parts:
            seen[part.modality] += 1
            limit = self.limits.get(part.modality, 0)
            if seen[part.modality] > limit:
                what = f"at most {limit} of this kind" if limit else f"no {part.modality}"
                raise InvalidRequest(f"this model takes {what} in a request", param=part.param)

    def render(self, ids: list[int], parts: Sequence[MediaPart], items: Sequence[Any]) -> dict[str, Any]:
        """The prompt as the engine takes it: vLLM's ``MultiModalInput``.

        Args:
            ids: the prompt with a placeholder for each item.
            parts: where the items come from, in the order of their placeholders.
            items: images as Pillow has them, audio as samples at the model's rate.

        Raises:
            InvalidRequest: the model's processor does not take them.
        """
        data: dict[str, list[Any]] = {}
        for part, item in zip(parts, items, strict=True):
            data.setdefault(part.modality, []).append((item, self.audio_rate_hz) if part.modality == "audio" else item)
        with _refusals(parts[0].param):
            prompt = {"prompt_token_ids": ids, "multi_modal_data": data}
            rendered: dict[str, Any] = self._renderer.process_for_engine(prompt, time.time(), skip_mm_cache=True)
        self._check_rest(_outside(rendered), parts[0].param)
        return rendered

    def check_text(self, ids: Sequence[int], param: str) -> None:
        """Refuse placeholders in a prompt that comes without images and audio."""
        if self._placeholders:
            self._check_rest(ids, param)

    def _check_rest(self, ids: Sequence[int], param: str) -> None:
        """Refuse a placeholder without an item: the model would take it for a word."""
        extra = next((self._placeholders[token] for token in ids if token in self._placeholders), None)
        if extra is not None:
            raise InvalidRequest(f"the prompt has more placeholders of {extra} than parts of that kind", param=param)

    @staticmethod
    def size_bytes(rendered: Mapping[str, Any]) -> int:
        """What the images and audio of a rendered prompt take."""
        from vllm.multimodal.cache.base import MultiModalCache

        return int(MultiModalCache.get_item_size(rendered["mm_kwargs"]))

    def close(self) -> None:
        """Let go of the renderer's threads."""
        self._renderer.shutdown()


def to_rgb(image: Any) -> Any:
    """An opened image as vLLM's server would take it: upright, and in RGB."""
    from vllm.multimodal.image import convert_image_mode, normalize_image

    return convert_image_mode(normalize_image(image), "RGB")


def _ranges(rendered: Mapping[str, Any]) -> Iterator[tuple[int, int, Any]]:
    """Where items stand in a rendered prompt: offset, length, and which of these tokens become embeddings."""
    for places in rendered["mm_placeholders"].values():
        for place in places:
            yield place.offset, place.length, place.is_embed


def _embedded(rendered: Mapping[str, Any]) -> set[int]:
    """The tokens in whose place the model puts its embeddings."""
    ids, found = rendered["prompt_token_ids"], set()
    for offset, length, is_embed in _ranges(rendered):
        mask = [True] * length if is_embed is None else is_embed.tolist()
        found |= {ids[offset + position] for position in range(length) if mask[position]}
    return found


def _outside(rendered: Mapping[str, Any]) -> list[int]:
    """The tokens of a rendered prompt that belong to no item."""
    inside = {offset + position for offset, length, _ in _ranges(rendered) for position in range(length)}
    return [token for position, token in enumerate(rendered["prompt_token_ids"]) if position not in inside]


@contextlib.contextmanager
def _refusals(param: str) -> Iterator[None]:
    """What the model's processor refuses, as this service's error; its own checks are assertions as well."""
    try:
        yield
    except Exception as error:
        said = " ".join(str(error).split())
        if isinstance(error, AssertionError) and "prompt replacement" in said:
            raise InvalidRequest(
                "there are more images or audio than placeholders in the prompt", param=param
            ) from error
        raise InvalidRequest(f"the model's processor refuses this: {said[:300]}", param=param) from error
