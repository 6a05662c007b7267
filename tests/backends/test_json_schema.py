"""What xgrammar would not follow of a schema is seen; what it follows passes."""

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from app.backends.json_schema import passed_over

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "integer", "not": {"const": 3}}, "not at #"),
        ({**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if at #"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired at #"),
        ({"type": "array", "items": {"$dynamicRef": "#x"}}, "$dynamicRef at #/items"),
        ({"$ref": "http://127.0.0.1:1/x.json"}, "a $ref to another place than #/… at #"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "a $ref to another place than #/… at #/properties/a"),
        ({"$ref": "#anchor"}, "a $ref to another place than #/… at #"),
        ({"$ref": "#/$defs/x", "minimum": 5}, "minimum beside $ref at #"),
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "type beside anyOf at #"),
        ({"anyOf": [{"type": "null"}, {"minLength": 3}]}, "minLength without type (a string's) at #/anyOf/1"),
        ({"maximum": 3}, "maximum without type (a number's) at #"),
    ],
    ids=str,
)
def test_what_would_be_passed_over_is_named_with_its_place(schema: Any, said: str) -> None:
    assert passed_over(schema) == said


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(gt=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(min_length=1, max_length=20)


class Household(BaseModel):
    """As pydantic writes a schema: references, optional fields, unions, bounds, a tree."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    color: Color = Color.RED
    note: str | None = None
    not_: int = Field(alias="not", default=3)
    rooms: list[Annotated[float, Field(ge=1)]] = Field(min_length=1, max_length=9)
    inner: "Household | None" = None


@pytest.mark.parametrize(
    "schema",
    [
        Household.model_json_schema(),
        {"$ref": "#"},
        {"enum": [{"not": 1}]},
        {"const": {"$ref": "x"}},
        {"type": "object", "properties": {"not": {"type": "string"}, "$ref": {"type": "string"}}},
        {"type": "string", "enum": ["a"], "maxLength": 1},
        {"anyOf": [{"type": "string"}], "title": "t", "x-mine": 1},
        True,
        [],
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_what_is_followed_passes(schema: Any) -> None:
    assert passed_over(schema) is None
