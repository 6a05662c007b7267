"""What differs between two OpenAPI documents, and which differences break clients: the rule of docs/clients.md as code.

What the rule does not know is breaking, and so is what cannot be read: a keyword without an entry in a table below
breaks when it changes.

``python -m tests.openapi_diff OLD NEW`` prints a line for each difference; exit status 1 when one of them is breaking.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
Use = frozenset[str]
"""Where a schema is used: in requests, in answers, or in both."""

REQUEST, ANSWER = "request", "answer"
BOTH: Use = frozenset({REQUEST, ANSWER})
WORDS = frozenset({"description", "summary", "title", "examples", "example", "externalDocs", "deprecated", "default"})
"""What people read, and what a service does by itself."""
LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
SCHEMA_OF_COMPONENTS = re.compile(r"#/components/schemas/([^/]+)")


@dataclass(frozen=True, order=True)
class Difference:
    """One difference.

    Attributes:
        path: where in the document, as ``paths./batch.post``.
    """

    path: str
    what: str
    is_breaking: bool

    def __str__(self) -> str:
        """A line for a person."""
        return f"{'BREAKING' if self.is_breaking else 'fine    '}  {self.path}: {self.what}"


Comparison = Callable[[Any, Any, str, Use], Iterator[Difference]]
"""Of two values that differ, or of which one is missing (None)."""


def differences(old: Any, new: Any) -> list[Difference]:
    """All differences between two documents, by their place."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return list(_breaking(old, new, "document", BOTH))
    old, new = (_inlined(one, one) for one in (old, new))
    document: dict[str, Comparison] = {
        "openapi": _version,
        "info": _fine,
        "tags": _fine,
        "components": partial(_components, _uses(old), _uses(new)),
        **dict.fromkeys(("paths", "security", "servers"), _seen_elsewhere),
    }
    found = [*_object(document, old, new, "", BOTH)]
    found += _map("the operation", partial(_object, OPERATION), _operations(old), _operations(new), "", BOTH)
    return sorted(found)


# --- values of any kind ----------------------------------------------------------------------------------------------


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON, where ``true`` is not 1."""
    return _text(one) == _text(other)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _changed(before: Any, after: Any, path: str, is_breaking: bool) -> Iterator[Difference]:
    if not _same(before, after):
        yield Difference(path, f"{before} is now {after}", is_breaking)


def _breaking(before: Any, after: Any, path: str, _: Use) -> Iterator[Difference]:
    yield from _changed(before, after, path, is_breaking=True)


def _fine(before: Any, after: Any, path: str, _: Use) -> Iterator[Difference]:
    if not _same(before, after):
        yield Difference(path, "changed", is_breaking=False)


def _seen_elsewhere(*_: Any) -> Iterator[Difference]:
    yield from ()


def _at(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _object(keys: Mapping[str, Comparison], old: Any, new: Any, path: str, use: Use) -> Iterator[Difference]:
    """Two objects key by key, each with its own comparison; a key that is not known breaks, but for words."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        yield from _breaking(old, new, path, use)
        return
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if not _same(before, after):
            compare = keys.get(key, _fine if key in WORDS else _breaking)
            yield from compare(before, after, _at(path, key), use)


def _map(what: str, compare: Comparison, old: Any, new: Any, path: str, use: Use) -> Iterator[Difference]:
    """Two objects with names for keys: one that is gone breaks, one that is new does not."""
    olds, news = ({} if one is None else one for one in (old, new))
    if not isinstance(olds, dict) or not isinstance(news, dict):
        yield from _breaking(old, new, path, use)
        return
    for name in sorted(olds.keys() | news.keys()):
        place = _at(path, name)
        if name not in news:
            yield Difference(place, f"{what} is gone", is_breaking=True)
        elif name not in olds:
            yield Difference(place, f"{what} is new", is_breaking=False)
        else:
            yield from compare(olds[name], news[name], place, use)


def _bare(value: Any) -> Any:
    """Without its words."""
    return {key: one for key, one in value.items() if key not in WORDS} if isinstance(value, dict) else value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# --- references ------------------------------------------------------------------------------------------------------


def _inlined(value: Any, document: Schema, above: frozenset[str] = frozenset()) -> Any:
    """With what each reference refers to in its place, but for schemas of the components, which have names."""
    if isinstance(value, list):
        return [_inlined(one, document, above) for one in value]
    if not isinstance(value, dict):
        return value
    ref = value.get("$ref")
    if isinstance(ref, str) and not SCHEMA_OF_COMPONENTS.fullmatch(ref) and ref not in above:
        target = _target(ref, document)
        if isinstance(target, dict):
            beside = {key: one for key, one in value.items() if key != "$ref"}
            is_narrower = ref.startswith("#/components/schemas/") and _bare(beside)
            both = {"allOf": [target, beside]} if is_narrower else {**target, **beside}
            return _inlined(both, document, above | {ref})
    return {key: _inlined(one, document, above) for key, one in value.items()}


def _target(ref: str, document: Any) -> Any:
    """What a reference within the document refers to; None when there is no such thing."""
    if not ref.startswith("#/"):
        return None
    found = document
    for part in ref.removeprefix("#/").split("/"):
        name = _unescaped(part)
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found.get(name)
        else:
            return None
    return found


def _unescaped(part: str) -> str:
    return unquote(part).replace("~1", "/").replace("~0", "~")


def _uses(document: Schema) -> dict[str, Use]:
    """For each schema of the components where it is used, by whatever way."""
    components = document.get("components")
    schemas = components.get("schemas") if isinstance(components, dict) else None
    if not isinstance(schemas, dict):
        return {}
    operations = _operations(document).values()
    only = {REQUEST: ("requestBody", "parameters"), ANSWER: ("responses",)}
    reached = {}
    for kind, others in ((REQUEST, only[ANSWER]), (ANSWER, only[REQUEST])):
        parts = [{k: v for k, v in one.items() if k not in others} for one in operations if isinstance(one, dict)]
        reached[kind] = _reached([parts, document.get("webhooks")], schemas)
    return {name: frozenset(kind for kind, names in reached.items() if name in names) for name in schemas}


def _reached(root: Any, schemas: Schema) -> set[str]:
    seen: set[str] = set()
    waiting = [root]
    while waiting:
        text = json.dumps(waiting.pop(), ensure_ascii=False)
        names = {_unescaped(name) for name in re.findall(r'"#/components/schemas/([^"/]+)', text)}
        waiting += [schemas.get(name) for name in names - seen]
        seen |= names
    return seen


# --- operations ------------------------------------------------------------------------------------------------------


def _operations(document: Schema) -> dict[str, Any]:
    """Each operation by its place, with what its path and the document say for all of theirs."""
    paths = document.get("paths", {})
    if not isinstance(paths, dict):
        return {"paths": paths}
    all_of = {"security": document.get("security", []), "servers": document.get("servers") or [{"url": "/"}]}
    found: dict[str, Any] = {}
    for path, item in paths.items():
        if not isinstance(item, dict):
            found[f"paths.{path}"] = item
            continue
        shared = {key: one for key, one in item.items() if key in WORDS | {"parameters", "servers"}}
        found |= {f"paths.{path}.{key}": item[key] for key in item.keys() - shared.keys() - set(METHODS)}
        for method in item.keys() & set(METHODS):
            operation = item[method]
            if isinstance(operation, dict):
                parameters = [*_list(shared.get("parameters")), *_list(operation.get("parameters"))]
                operation = {**all_of, **shared, **operation, "parameters": parameters}
            found[f"paths.{path}.{method}"] = operation
    return found


def _version(before: Any, after: Any, path: str, _: Use) -> Iterator[Difference]:
    """Of OpenAPI: the third number changes no meaning."""
    is_near = str(before).split(".")[:2] == str(after).split(".")[:2]
    yield from _changed(before, after, path, is_breaking=not is_near)


def _security(before: Any, after: Any, path: str, _: Use) -> Iterator[Difference]:
    """Each way to sign in that was enough must be enough."""
    olds, news = ([_text(way) for way in _list(one)] or ["{}"] for one in (before, after))
    is_open = "{}" in news
    yield from _changed(before, after, path, is_breaking=not is_open and not set(olds) <= set(news))


def _servers(before: Any, after: Any, path: str, _: Use) -> Iterator[Difference]:
    """Generated clients call the first; none may be gone."""
    olds, news = ([_text(_bare(server)) for server in _list(one)] for one in (before, after))
    yield from _changed(before, after, path, is_breaking=olds[:1] != news[:1] or not set(olds) <= set(news))


def _parameters(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    olds, news = ({_name(one): one for one in _list(many)} for many in (before, after))
    for name in sorted(news.keys() - olds.keys()):
        yield Difference(_at(path, name), "the parameter is new", is_breaking=not _is_optional(news[name]))
    known = {name: one for name, one in news.items() if name in olds}
    yield from _map("the parameter", partial(_object, VALUE), olds, known, path, frozenset({REQUEST}))


def _name(parameter: Any) -> str:
    """Where it is sent and its name; all of a parameter that cannot be read."""
    if not isinstance(parameter, dict) or "in" not in parameter or "name" not in parameter:
        return _text(parameter)
    name = f"{parameter['in']}.{parameter['name']}"
    return name.lower() if parameter["in"] == "header" else name


def _is_optional(parameter: Any) -> bool:
    return isinstance(parameter, dict) and "in" in parameter and not parameter.get("required")


def _body(before: Any, after: Any, path: str, _: Use) -> Iterator[Difference]:
    if after is None:
        yield Difference(path, "the body is gone", is_breaking=True)
    else:
        yield from _object(BODY, {} if before is None else before, after, path, frozenset({REQUEST}))


def _needed(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    """``required`` of a body, a parameter, a header."""
    is_other = bool(before) != bool(after)
    yield from _changed(before, after, path, is_breaking=is_other and (REQUEST if after else ANSWER) in use)


def _responses(before: Any, after: Any, path: str, _: Use) -> Iterator[Difference]:
    """As a map, but errors may go."""
    gone = set()
    if isinstance(before, dict) and isinstance(after, dict):
        gone = {status for status in before.keys() - after.keys() if _is_error(status, before)}
        before = {status: one for status, one in before.items() if status not in gone}
    for status in gone:
        yield Difference(_at(path, status), "the error is gone", is_breaking=False)
    yield from _map("the answer", partial(_object, RESPONSE), before, after, path, frozenset({ANSWER}))


def _is_error(status: str, responses: Schema) -> bool:
    """``default`` is one where a success is documented."""
    return status[:1] in ("4", "5") or (status == "default" and any(one[:1] == "2" for one in responses))


def _headers(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    olds, news = (
        {name.lower(): header for name, header in one.items()} if isinstance(one, dict) else one
        for one in (before, after)
    )
    yield from _map("the header", partial(_object, VALUE), olds, news, path, use)


def _components(
    olds: dict[str, Use], news: dict[str, Use], before: Any, after: Any, path: str, use: Use
) -> Iterator[Difference]:
    """Schemas by their use, and ways to sign in; all else is seen where it is referred to."""

    def schema(old: Any, new: Any, place: str, _: Use) -> Iterator[Difference]:
        name = place.removeprefix(f"{path}.schemas.")
        # A schema that nothing refers to may be used anyhow.
        yield from _schema(old, new, place, (olds.get(name, BOTH) | news.get(name, BOTH)) or BOTH)

    keys = {
        "schemas": partial(_map, "the schema", schema),
        "securitySchemes": partial(_map, "the way to sign in", partial(_object, {})),
    }
    others = ("parameters", "headers", "responses", "requestBodies", "examples", "links", "callbacks", "pathItems")
    before, after = ({} if one is None else one for one in (before, after))
    yield from _object({**dict.fromkeys(others, _fine), **keys}, before, after, path, use)


# --- schemas ---------------------------------------------------------------------------------------------------------


def _schema(old: Any, new: Any, path: str, use: Use) -> Iterator[Difference]:
    """Two schemas, alternative by alternative: a plain schema is a choice of one. None and true take anything."""
    old, new = ({} if one is None or one is True else one for one in (old, new))
    if old is False or new is False:
        yield from _changed(old, new, path, is_breaking=new is False or ANSWER in use)
    elif not isinstance(old, dict) or not isinstance(new, dict):
        yield from _breaking(old, new, path, use)
    elif bool(_bare(old)) != bool(_bare(new)):
        what, where = ("may now be anything", ANSWER) if _bare(old) else ("may no longer be anything", REQUEST)
        yield Difference(path, what, is_breaking=where in use)
    else:
        yield from _choice(old, new, path, use)


def _choice(old: Schema, new: Schema, path: str, use: Use) -> Iterator[Difference]:
    (olds, beside_old), (news, beside_new) = _split(old), _split(new)
    yield from _object(KEYWORDS, beside_old, beside_new, path, use)
    counts = [Counter(map(_kind, many)) for many in (olds, news)]
    crowded = {kind for count in counts for kind, number in count.items() if number > 1}
    named, renamed = ({_alternative(one, crowded): one for one in many} for many in (olds, news))
    for name in sorted(named.keys() - renamed.keys()):
        yield Difference(path, f"no longer {name}", is_breaking=REQUEST in use)
    for name in sorted(renamed.keys() - named.keys()):
        yield Difference(path, f"may now be {name}", is_breaking=ANSWER in use)
    for name in sorted(named.keys() & renamed.keys()):
        yield from _object(KEYWORDS, named[name], renamed[name], path, use)


def _split(schema: Schema) -> tuple[list[Schema], Schema]:
    """The alternatives, and what holds for all of them."""
    choice = schema.get("anyOf")
    if not isinstance(choice, list) or not choice:
        words = {key: one for key, one in schema.items() if key in WORDS}
        return _by_type(_bare(schema)), words
    beside = {key: one for key, one in schema.items() if key != "anyOf"}
    return [plain for one in choice for plain in _plain(one)], _const_as_enum(beside)


def _plain(schema: Any) -> list[Schema]:
    """An alternative as one or more that are no choices, where they can be told apart."""
    if schema is True:
        return [{}]
    if not isinstance(schema, dict):
        return [{"not a schema": schema}]
    is_choice = _bare(schema).keys() == {"anyOf"} and isinstance(schema["anyOf"], list)
    return [plain for one in schema["anyOf"] for plain in _plain(one)] if is_choice else _by_type(schema)


def _by_type(schema: Schema) -> list[Schema]:
    """A list of types as an alternative for each."""
    types = schema.get("type")
    if not isinstance(types, list) or not types:
        return [_const_as_enum(schema)]
    return [_const_as_enum({**schema, "type": one}) for one in types]


def _const_as_enum(schema: Schema) -> Schema:
    if "const" not in schema or "enum" in schema:
        return schema
    return {key: one for key, one in schema.items() if key != "const"} | {"enum": [schema["const"]]}


def _kind(schema: Schema) -> str:
    return str(schema.get("$ref") or schema.get("type") or "anything")


def _alternative(schema: Schema, crowded: set[str]) -> str:
    """Its kind; all of it where others are of its kind."""
    kind = _kind(schema)
    return f"{kind} {_text(_bare(schema))}" if kind in crowded else kind


def _required(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    """A request may not be asked for more, an answer may not hold less."""
    olds, news = ({_text(name) for name in _list(one)} for one in (before, after))
    is_breaking = (REQUEST in use and bool(news - olds)) or (ANSWER in use and bool(olds - news))
    yield from _changed(before, after, path, is_breaking)


def _enum(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    """Requests may not lose values, answers may not gain some that a client does not know; without it all are there."""
    olds, news = ({_text(value) for value in _list(one)} for one in (before, after))
    is_less = before is None or (after is not None and bool(olds - news))
    is_more = after is None or (before is not None and bool(news - olds))
    yield from _changed(before, after, path, (REQUEST in use and is_less) or (ANSWER in use and is_more))


def _bound(is_lower: bool, before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    """A request's may only be wider."""
    is_number = all(one is None or type(one) in (int, float) for one in (before, after))
    if not is_number:
        yield from _breaking(before, after, path, use)
        return
    is_wider = after is None or (before is not None and (after <= before if is_lower else after >= before))
    yield from _changed(before, after, path, is_breaking=REQUEST in use and not is_wider)


def _condition(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    """A new one asks more of requests, one that is gone says less of answers; another one is both."""
    is_breaking = (REQUEST in use and after is not None) or (ANSWER in use and before is not None)
    yield from _changed(before, after, path, is_breaking)


def _more_properties(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    """A free object may not be closed; a closed one may be opened, as it may gain fields."""
    if before is False or after is False:
        yield from _changed(before, after, path, is_breaking=after is False)
    else:
        yield from _schema(before, after, path, use)


def _all_of(before: Any, after: Any, path: str, use: Use) -> Iterator[Difference]:
    olds, news = _list(before), _list(after)
    if len(olds) != len(news):
        yield from _breaking(before, after, path, use)
        return
    for at, (old, new) in enumerate(zip(olds, news, strict=True)):
        if not _same(old, new):
            yield from _schema(old, new, f"{path}.{at}", use)


KEYWORDS: dict[str, Comparison] = {
    "properties": partial(_map, "the field", _schema),
    "items": _schema,
    "propertyNames": _schema,
    "additionalProperties": _more_properties,
    "allOf": _all_of,
    "required": _required,
    "enum": _enum,
    "pattern": _condition,
    "multipleOf": _condition,
    **dict.fromkeys(LOWER, partial(_bound, True)),
    **dict.fromkeys(UPPER, partial(_bound, False)),
}
MEDIA_TYPE: dict[str, Comparison] = {"schema": _schema}
CONTENT: Comparison = partial(_map, "the media type", partial(_object, MEDIA_TYPE))
BODY: dict[str, Comparison] = {"required": _needed, "content": CONTENT}
VALUE: dict[str, Comparison] = {"required": _needed, "content": CONTENT, "schema": _schema}
"""A parameter of a request, a header of an answer."""
RESPONSE: dict[str, Comparison] = {"content": CONTENT, "headers": _headers}
OPERATION: dict[str, Comparison] = {  # operationId and tags break: they become names in generated clients
    "security": _security,
    "servers": _servers,
    "parameters": _parameters,
    "requestBody": _body,
    "responses": _responses,
}


def main(arguments: list[str]) -> int:
    """Compare two files."""
    old, new = (json.loads(Path(name).read_text(encoding="utf-8")) for name in arguments)
    found = differences(old, new)
    print("\n".join(map(str, found)) or "no difference")
    return 1 if any(one.is_breaking for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
