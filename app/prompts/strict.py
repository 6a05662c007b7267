"""The base of every body: strict types, unknown fields refused with the nearest known one."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class StrictModel(BaseModel):
    """A JSON object with known fields only."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_field(cls, value: Any) -> Any:
        """Complain of the first one: pydantic would list a million of them."""
        if isinstance(value, dict):
            for name in value:
                if name not in cls.model_fields:
                    raise PydanticCustomError(
                        "unknown_field",
                        "{message}",
                        {"message": unknown(name, cls.model_fields), "param": name},
                    )
        return value


def unknown(name: str, known: Iterable[str]) -> str:
    """The message for an unknown field, with the known one nearest to it."""
    close = difflib.get_close_matches(name[:64], list(known), n=1)
    return f"unknown field {name!r:.80}" + (f"; did you mean {close[0]}?" if close else "")
