"""What differs between two OpenAPI documents, and which differences break clients: the rule of docs/clients.md as code.

``python -m tests.openapi_diff OLD NEW`` prints a line for each difference; exit status 1 when one of them is breaking.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Schema = dict[str, Any]
Use = frozenset[str]
"""Where a schema is used: in requests, in answers, or in both."""

REQUEST, ANSWER = "request", "answer"
WORDS = frozenset({"description", "summary", "title", "examples", "example", "headers"})
"""What people read; and headers of answers, which only ever say more."""
LOWER = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
UPPER = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})


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


def differences(old: Schema, new: Schema) -> list[Difference]:
    """All differences between two documents, by their place."""
    found = [*_operations(old.get("paths", {}), new.get("paths", {})), *_components(old, new)]
    for name in ("openapi", "info", "servers", "tags"):
        if old.get(name) != new.get(name):
            found.append(Difference(name, "changed", is_breaking=False))
    return sorted(found)


def _operations(old: Schema, new: Schema) -> Iterator[Difference]:
    olds, news = _flat(old), _flat(new)
    yield from _names(olds, news, "the operation", breaks_when_gone=True)
    for name in olds.keys() & news.keys():
        yield from _operation(olds[name], news[name], name)


def _flat(paths: Schema) -> dict[str, Schema]:
    return {f"paths.{path}.{method}": op for path, methods in paths.items() for method, op in methods.items()}


def _operation(old: Schema, new: Schema, path: str) -> Iterator[Difference]:
    for name in ("operationId", "tags"):  # both become names in generated clients
        if old.get(name) != new.get(name):
            yield Difference(f"{path}.{name}", f"{old.get(name)} is now {new.get(name)}", is_breaking=True)
    if old.get("security") != new.get("security"):
        before, after = old.get("security", [{}]), new.get("security", [{}])
        is_open = {} in after or all(one in after for one in before)
        yield Difference(f"{path}.security", "changed", is_breaking=not is_open)
    yield from _parameters(old.get("parameters", []), new.get("parameters", []), f"{path}.parameters")
    yield from _body(old.get("requestBody", {}), new.get("requestBody", {}), f"{path}.requestBody")
    yield from _responses(old.get("responses", {}), new.get("responses", {}), f"{path}.responses")
    yield from _words(old, new, path)


def _parameters(old: list[Schema], new: list[Schema], path: str) -> Iterator[Difference]:
    olds, news = ({f"{path}.{one['in']}.{one['name']}": one for one in many} for many in (old, new))
    yield from _names(olds, {name: one for name, one in news.items() if name in olds}, "the parameter", True)
    for name, one in news.items():
        if olds.get(name) != one:
            is_needed = bool(one.get("required")) and not olds.get(name, {}).get("required")
            is_new = name not in olds
            yield Difference(name, "new" if is_new else "changed", is_breaking=is_needed or not is_new)


def _body(old: Schema, new: Schema, path: str) -> Iterator[Difference]:
    if old.get("required", False) != new.get("required", False):
        yield Difference(path, "required changed", is_breaking=bool(new.get("required")))
    yield from _content(old.get("content", {}), new.get("content", {}), path, frozenset({REQUEST}))


def _responses(old: Schema, new: Schema, path: str) -> Iterator[Difference]:
    for status in sorted(old.keys() | new.keys()):
        place, before, after = f"{path}.{status}", old.get(status), new.get(status)
        if before is None or after is None:
            is_success = status.startswith("2")
            yield Difference(place, "new" if before is None else "gone", is_breaking=is_success and after is None)
            continue
        yield from _content(before.get("content", {}), after.get("content", {}), place, frozenset({ANSWER}))
        yield from _words(before, after, place)


def _content(old: Schema, new: Schema, path: str, use: Use) -> Iterator[Difference]:
    olds, news = ({f"{path}.{media}": content for media, content in many.items()} for many in (old, new))
    yield from _names(olds, news, "the media type", breaks_when_gone=True)
    for name in olds.keys() & news.keys():
        yield from _schema(olds[name].get("schema", {}), news[name].get("schema", {}), name, use)
        yield from _words(olds[name], news[name], name)


def _components(old: Schema, new: Schema) -> Iterator[Difference]:
    uses = _uses(old), _uses(new)
    olds, news = old.get("components", {}), new.get("components", {})
    before, after = olds.get("schemas", {}), news.get("schemas", {})
    for name in sorted(before.keys() | after.keys()):
        path = f"components.schemas.{name}"
        if name not in before or name not in after:
            yield Difference(path, "new" if name in after else "gone", is_breaking=name not in after)
            continue
        use = frozenset(kind for of in uses for kind in of.get(name, frozenset()))
        yield from _schema(before[name], after[name], path, use)
    yield from _ways_to_sign_in(olds.get("securitySchemes", {}), news.get("securitySchemes", {}))


def _ways_to_sign_in(old: Schema, new: Schema) -> Iterator[Difference]:
    for name in old.keys() & new.keys():
        before, after = ({key: one[name][key] for key in one[name].keys() - WORDS} for one in (old, new))
        if before != after:
            yield Difference(f"components.securitySchemes.{name}", "changed", is_breaking=True)
    yield from _names(old, new, "the way to sign in", breaks_when_gone=True)


def _uses(document: Schema) -> dict[str, Use]:
    """For each schema of the components where it is used, by whatever way."""
    schemas = document.get("components", {}).get("schemas", {})
    operations = _flat(document.get("paths", {})).values()
    roots = {
        REQUEST: [[one.get("requestBody"), one.get("parameters")] for one in operations],
        ANSWER: [one.get("responses") for one in operations],
    }
    reached = {kind: _reached(root, schemas) for kind, root in roots.items()}
    return {name: frozenset(kind for kind, names in reached.items() if name in names) for name in schemas}


def _reached(root: Any, schemas: Schema) -> set[str]:
    seen: set[str] = set()
    waiting = [root]
    while waiting:
        for name in set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(waiting.pop()))) - seen:
            seen.add(name)
            waiting.append(schemas.get(name))
    return seen


def _schema(old: Schema, new: Schema, path: str, use: Use) -> Iterator[Difference]:
    """Two schemas, alternative by alternative: a plain schema is a choice of one."""
    yield from _words(old, new, path)
    olds, news = _alternatives(old), _alternatives(new)
    gone, come = olds.keys() - news.keys(), news.keys() - olds.keys()
    for kind in gone:
        yield Difference(path, f"no longer {kind}", is_breaking=REQUEST in use or bool(come))
    for kind in come:
        yield Difference(path, f"may now be {kind}", is_breaking=ANSWER in use or bool(gone))
    for kind in olds.keys() & news.keys():
        yield from _plain(olds[kind], news[kind], path, use)


def _alternatives(schema: Schema) -> dict[str, Schema]:
    if choice := schema.get("anyOf") or schema.get("oneOf"):
        return {kind: plain for one in choice for kind, plain in _alternatives(one).items()}
    return {str(schema.get("$ref") or schema.get("type") or "anything"): schema}


def _plain(old: Schema, new: Schema, path: str, use: Use) -> Iterator[Difference]:
    """Two schemas of one kind."""
    yield from _properties(old.get("properties", {}), new.get("properties", {}), path, use)
    for key in sorted((old.keys() | new.keys()) - WORDS - {"properties", "anyOf", "oneOf", "$ref"}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _schema(before, after, f"{path}.{key}", use)
        else:
            yield Difference(f"{path}.{key}", f"{before} is now {after}", is_breaking=_breaks(key, before, after, use))


def _properties(old: Schema, new: Schema, path: str, use: Use) -> Iterator[Difference]:
    olds, news = ({f"{path}.{name}": one for name, one in many.items()} for many in (old, new))
    yield from _names(olds, news, "the field", breaks_when_gone=True)
    for name in olds.keys() & news.keys():
        yield from _schema(olds[name], news[name], name, use)


def _breaks(key: str, before: Any, after: Any, use: Use) -> bool:
    """Whether a changed keyword breaks: a request may not be asked for more, an answer may not hold less."""
    if key in ("required", "enum"):
        more, fewer = set(after or ()) - set(before or ()), set(before or ()) - set(after or ())
        if key == "enum":  # requests lose values, answers gain values that a client does not know
            more, fewer = fewer, more
        return bool(REQUEST in use and more) or bool(ANSWER in use and fewer)
    if key in LOWER | UPPER:
        if after is None or REQUEST not in use:
            return False
        return before is None or (after > before if key in LOWER else after < before)
    if key == "additionalProperties":
        return after not in (True, None) and REQUEST in use
    return True


def _names(old: Schema, new: Schema, what: str, breaks_when_gone: bool) -> Iterator[Difference]:
    for path in old.keys() - new.keys():
        yield Difference(path, f"{what} is gone", is_breaking=breaks_when_gone)
    for path in new.keys() - old.keys():
        yield Difference(path, f"{what} is new", is_breaking=False)


def _words(old: Schema, new: Schema, path: str) -> Iterator[Difference]:
    for name in sorted(WORDS & (old.keys() | new.keys())):
        if old.get(name) != new.get(name):
            yield Difference(f"{path}.{name}", "changed", is_breaking=False)


def main(arguments: list[str]) -> int:
    """Compare two files."""
    old, new = (json.loads(Path(name).read_text()) for name in arguments)
    found = differences(old, new)
    print("\n".join(map(str, found)) or "no difference")
    return 1 if any(one.is_breaking for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
