"""The base of every body: strict types, unknown fields refused with the nearest known one."""

import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class StrictModel(BaseModel):
    """A JSON object with known fields only."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    _names: ClassVar[Collection[str] | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Names are a class's own, not those of the one it is made from."""
        cls._names = None

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_field(cls, value: Any) -> Any:
        """Complain of the first one: pydantic would list a million of them."""
        if isinstance(value, dict):
            known = cls.field_names()
            for name in value:
                if name not in known:
                    raise PydanticCustomError(
                        "unknown_field", "{message}", {"message": unknown(name, known), "param": name}
                    )
        return value

    @classmethod
    def field_names(cls) -> Collection[str]:
        """The names of the fields, as a body has them."""
        if cls._names is None:
            cls._names = {field.alias or name for name, field in cls.model_fields.items()}
        return cls._names


class OpenModel(BaseModel):
    """A JSON object with strict types, in which unknown fields are of no effect; they are kept, to be told of."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())


def extras(value: Any, path: str) -> Iterator[str]:
    """The paths of the unknown fields within a value that holds open models."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from extras(item, f"{path}.{index}")
    elif isinstance(value, OpenModel):
        yield from (f"{path}.{name}" for name in value.model_extra or {})
        for name, field in type(value).model_fields.items():
            yield from extras(getattr(value, name), f"{path}.{field.alias or name}")


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for an unknown field, with the known one nearest to it."""
    close = difflib.get_close_matches(name[:64], list(known), n=1)
    return f"unknown field {name!r:.80}" + (f"; did you mean {close[0]}?" if close else "")
