"""JSON schemas whose bounded strings stay JSON.

xgrammar 0.2.8 lets control characters into a string that has ``minLength`` or ``maxLength``, as they are, and no parser
reads such a text. The same bounds in a ``pattern`` that leaves these characters out do what the schema means.
"""

from typing import Any

LENGTHS = ("minLength", "maxLength")
VALUES = ("enum", "const", "default", "examples")
"""Keywords that hold values, not schemas."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords that hold schemas by name: their keys are no keywords."""


def with_safe_strings(schema: Any) -> Any:
    """The schema with bounded strings written as patterns; anything but a schema comes back as it is."""
    if isinstance(schema, list):
        return [with_safe_strings(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return _as_pattern({key: _within(key, value) for key, value in schema.items()})


def _within(key: str, value: Any) -> Any:
    if key in VALUES:
        return value
    if key in NAMED and isinstance(value, dict):
        return {name: with_safe_strings(item) for name, item in value.items()}
    return with_safe_strings(value)


def _as_pattern(schema: dict[str, Any]) -> dict[str, Any]:
    types = schema.get("type")
    is_string = types == "string" or (isinstance(types, list) and "string" in types)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    are_numbers = type(least) is int and (most == "" or type(most) is int)
    if not is_string or not are_numbers or not schema.keys() & set(LENGTHS) or schema.keys() & {"pattern", "format"}:
        return schema
    bounded = {key: value for key, value in schema.items() if key not in LENGTHS}
    return {**bounded, "pattern": rf'^[^"\\\x00-\x1f]{{{least},{most}}}$'}
