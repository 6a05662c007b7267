"""What of a JSON schema xgrammar 0.2.8 would pass over in silence, beyond what vLLM itself knows of."""

from collections.abc import Iterator
from typing import Any

PASSED_OVER = ("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies")
REFERENCES = ("$dynamicRef", "$recursiveRef")
OF_ONE_TYPE = {
    "a number's": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "a string's": ("minLength", "maxLength", "pattern", "format"),
    "an array's": ("minItems", "maxItems", "uniqueItems", "contains"),
}
"""Keywords that are followed only beside ``type``."""
ALONE = ("$ref", "anyOf", "oneOf")
"""Beside one of these, every keyword that constrains is passed over."""
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("nullable", "$comment", "$schema", "$id", "id", "$anchor", "$defs", "definitions"),
    )
)
VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values, not schemas."""
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords that hold schemas by name: their keys are no keywords."""


def passed_over(schema: Any) -> str | None:
    """What would not be followed, by keyword and place; None: nothing is known that would not."""
    return next((f"{reason} at {path}" for path, part in _schemas(schema, "#") if (reason := _of_one(part))), None)


def _schemas(part: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas within one, with their places; the nesting is bounded before."""
    if isinstance(part, list):
        for index, item in enumerate(part):
            yield from _schemas(item, f"{path}/{index}")
    if not isinstance(part, dict):
        return
    yield path, part
    for key, value in part.items():
        if key in BY_NAME and isinstance(value, dict):
            for name, item in value.items():
                yield from _schemas(item, f"{path}/{key}/{name}")
        elif key not in VALUES:
            yield from _schemas(value, f"{path}/{key}")


def _of_one(schema: dict[str, Any]) -> str | None:
    """What of this one schema, leaving aside those within it."""
    keyword = next((key for key in (*PASSED_OVER, *REFERENCES) if key in schema), None)
    reference = schema.get("$ref")
    if keyword is not None:
        return keyword
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        return "a $ref to another place than #/…"
    if (alone := next((key for key in ALONE if key in schema), None)) is not None:
        beside = [key for key in schema if key != alone and key not in ANNOTATIONS and not key.startswith("x-")]
        return f"{beside[0]} beside {alone}" if beside else None
    if schema.keys() & {"type", "enum", "const", "allOf"}:
        return None
    return next(
        (f"{key} without type ({whose})" for whose, keys in OF_ONE_TYPE.items() for key in keys if key in schema), None
    )
