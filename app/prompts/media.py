"""Images and audio on the wire: content parts of messages, items of a data-set row, and their placeholders in text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from app.errors import InvalidRequest
from app.prompts.strict import StrictModel

Modality: TypeAlias = Literal["image", "audio"]
PART_TYPES = ("text", "image_url", "input_audio", "audio_url")
KINDS_OF_MEDIA: tuple[Modality, ...] = ("image", "audio")
_PARTS: dict[Modality, str] = {"image": "images", "audio": "audio files"}
UUID = "0"
"""vLLM takes a part without data when it has a ``uuid``; data and placeholders meet in the backend."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image or audio that a prompt holds.

    Attributes:
        modality: which of the two.
        source: an http(s) URL, a data URI, or for audio the base64 text of a file.
        param: path of the source within the body.
    """

    modality: Modality
    source: str
    param: str


def _is_text(value: Any) -> str:
    return "~url" if isinstance(value, str) else "~object"


class ImageUrl(StrictModel):
    """Where an image is."""

    url: str = Field(
        min_length=1,
        description="A data URI in base64, or an http(s) URL whose host the setting `allowed_media_domains` names.",
        examples=["data:image/png;base64,iVBORw0KGgo="],
    )
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        None, description="OpenAI's; of no effect here, as in vLLM's server."
    )


class AudioUrl(StrictModel):
    """Where an audio file is."""

    url: str = Field(
        min_length=1,
        description="A data URI in base64, or an http(s) URL whose host the setting `allowed_media_domains` names.",
        examples=["data:audio/wav;base64,UklGRg=="],
    )


class InputAudio(StrictModel):
    """An audio file in base64."""

    data: str = Field(min_length=1, description="The file, WAV, FLAC, OGG or MP3, in base64.", examples=["UklGRg=="])
    format: str | None = Field(
        None, max_length=32, description="OpenAI's name of its format; of no effect: the file itself tells."
    )


class _NoUuid(StrictModel):
    """Parts that hold their media themselves."""

    @model_validator(mode="before")
    @classmethod
    def _without_uuid(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("uuid") is not None:
            raise PydanticCustomError(
                "uuid", "is not supported: media are not kept between requests", {"param": "uuid"}
            )
        return value


class ImagePart(_NoUuid):
    """An image within a chat message."""

    type: Literal["image_url"] = Field(description="The kind of part: `image_url`.")
    image_url: Annotated[
        Annotated[str, Field(min_length=1), Tag("~url")] | Annotated[ImageUrl, Tag("~object")], Discriminator(_is_text)
    ] = Field(description="Where the image is: an object, or its `url` alone.")

    def media(self, param: str) -> MediaPart:
        """The image, for a part that stands at ``param``."""
        if isinstance(self.image_url, str):
            return MediaPart("image", self.image_url, f"{param}.image_url")
        return MediaPart("image", self.image_url.url, f"{param}.image_url.url")


class AudioUrlPart(_NoUuid):
    """An audio file within a chat message, as vLLM's server has it."""

    type: Literal["audio_url"] = Field(description="The kind of part: `audio_url`.")
    audio_url: Annotated[
        Annotated[str, Field(min_length=1), Tag("~url")] | Annotated[AudioUrl, Tag("~object")], Discriminator(_is_text)
    ] = Field(description="Where the audio file is: an object, or its `url` alone.")

    def media(self, param: str) -> MediaPart:
        """The audio, for a part that stands at ``param``."""
        if isinstance(self.audio_url, str):
            return MediaPart("audio", self.audio_url, f"{param}.audio_url")
        return MediaPart("audio", self.audio_url.url, f"{param}.audio_url.url")


class InputAudioPart(_NoUuid):
    """An audio file within a chat message, as OpenAI's API has it."""

    type: Literal["input_audio"] = Field(description="The kind of part: `input_audio`.")
    input_audio: InputAudio = Field(description="The audio file.")

    def media(self, param: str) -> MediaPart:
        """The audio, for a part that stands at ``param``."""
        return MediaPart("audio", self.input_audio.data, f"{param}.input_audio.data")


AnyMediaPart: TypeAlias = ImagePart | InputAudioPart | AudioUrlPart


def for_vllm(part: AnyMediaPart) -> dict[str, Any]:
    """What stands for an image or audio in a message for vLLM: a part that gets its placeholder, and is not fetched."""
    name = "image_url" if isinstance(part, ImagePart) else "audio_url"
    return {"type": name, name: None, "uuid": UUID}


class _Row(BaseModel):
    """An item of a data-set row; whatever else GuideLLM writes beside it is of no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ImageRow(_Row):
    """An image of a row, as GuideLLM has it; further members are of no effect."""

    image: str = Field(
        min_length=1,
        description="A data URI in base64, or an http(s) URL whose host the setting `allowed_media_domains` names.",
    )


class AudioRow(_Row):
    """An audio file of a row, as GuideLLM has it; further members are of no effect."""

    audio: str = Field(
        min_length=1,
        description="The file, WAV, FLAC, OGG or MP3, in base64 or as a data URI, or an http(s) URL whose host the "
        "setting `allowed_media_domains` names.",
    )


ImageItem: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1), Tag("~url")] | Annotated[ImageRow, Tag("~object")], Discriminator(_is_text)
]
AudioItem: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1), Tag("~url")] | Annotated[AudioRow, Tag("~object")], Discriminator(_is_text)
]


def image_of(item: str | ImageRow, param: str) -> MediaPart:
    """The image of a row's item that stands at ``param``."""
    return (
        MediaPart("image", item, param) if isinstance(item, str) else MediaPart("image", item.image, f"{param}.image")
    )


def audio_of(item: str | AudioRow, param: str) -> MediaPart:
    """The audio of a row's item that stands at ``param``."""
    return (
        MediaPart("audio", item, param) if isinstance(item, str) else MediaPart("audio", item.audio, f"{param}.audio")
    )


@dataclass(frozen=True, slots=True)
class Placeholders:
    """What stands for media in ``plain`` text.

    Attributes:
        image: for an image; None: the model takes none, and no text is searched for it.
        audio: the same for audio.
    """

    image: str | None
    audio: str | None

    def of(self, modality: Modality) -> str | None:
        """The placeholder of a kind of media."""
        return self.image if modality == "image" else self.audio

    def missing(self, texts: Sequence[str], media: Sequence[MediaPart], param: str) -> dict[Modality, str]:
        """The placeholders that the texts of a conversation leave to be added: those of a kind that they have none of.

        Args:
            texts: all of the conversation.
            media: all of the conversation.
            param: what to name in an error that is no single part's.

        Raises:
            InvalidRequest: the texts have placeholders, and not as many as there are media of the kind.
        """
        counts = Counter(part.modality for part in media)
        added: dict[Modality, str] = {}
        for modality in KINDS_OF_MEDIA:
            mark, count = self.of(modality), counts[modality]
            if mark is None:
                continue
            found = sum(text.count(mark) for text in texts)
            if found not in (0, count):
                raise InvalidRequest(
                    f"{found} placeholders {mark} in the text, but {count} {_PARTS[modality]}: "
                    "write as many, or none at all",
                    param=param,
                )
            if not found:
                added[modality] = mark
        return added
