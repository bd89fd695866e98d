"""Converts the text of an argument to JSON by the types in the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from semantic.application.chat.object_text import MAX_DEPTH
from semantic.domain.chat import JsonSchema, replace_surrogates

Kinds = frozenset[str]
"""The JSON types that a schema allows; empty for a schema without types."""

_ANY: Final[Kinds] = frozenset()
_KINDS: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
_CONTAINERS: Final[Kinds] = frozenset({"object", "array"})
_MOST_SCHEMAS: Final = 200
"""The maximum number of schemas to read for one argument, as references may be circular."""
_LONGEST_LITERAL: Final = 1 << 16
_NAMES: Final[dict[type, str]] = {
    bool: "boolean",
    type(None): "null",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    tuple: "array",
}
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
_JSON_WORDS: Final[dict[str, bool | None]] = {"true": True, "false": False, "null": None}
_LITERAL_ERRORS: Final = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class ArgumentTypes:
    def __init__(self, parameters: JsonSchema, *, untyped_is_text: bool = True) -> None:
        """An argument without a type is text if `untyped_is_text`, otherwise JSON."""
        found = parameters.get("properties")
        self._root = parameters
        self._properties = found if isinstance(found, Mapping) else {}
        self._untyped_is_text = untyped_is_text
        self._known: dict[str, Kinds] = {}

    def is_text(self, name: str) -> bool:
        """Return whether the argument `name` is always text."""
        kinds = self._kinds(name)
        return kinds == {"string"} or (
            not kinds and self._untyped_is_text and name not in self._properties
        )

    def value(self, name: str, text: str) -> str:
        """Return the JSON of an argument that a model wrote as `text`."""
        if self.is_text(name):
            return _string(text)
        kinds = self._kinds(name)
        if not kinds:
            declared = name in self._properties
            kinds = _CONTAINERS if declared and self._untyped_is_text else frozenset(_KINDS[1:])
        found = _json_of(text.strip(), kinds)
        return _string(text) if found is None else found

    def kind(self, name: str) -> str:
        """Return a type that the argument's schema allows."""
        kinds = self._kinds(name) or {"string"}
        return next(kind for kind in _KINDS if kind in kinds)

    def json(self, text: str) -> str:
        """Return `text` as JSON of any type. Malformed text becomes a string."""
        return any_json(text) or _string(text)

    def _kinds(self, name: str) -> Kinds:
        if name not in self._known:
            schema = self._properties.get(name)
            seen: list[object] = []
            self._known[name] = _kinds_of(schema, self._root, seen)
        return self._known[name]


def with_types(parameters: JsonSchema) -> JsonSchema:
    """Return `parameters` with exactly one type for each property."""
    types, found = ArgumentTypes(parameters), parameters.get("properties")
    if not isinstance(found, Mapping):
        return parameters
    typed = {
        name: {**schema, "type": types.kind(name)}
        for name, schema in found.items()
        if isinstance(schema, Mapping) and not isinstance(schema.get("type"), str)
    }
    return {**parameters, "properties": {**found, **typed}}


def any_json(text: str) -> str | None:
    """Return `text`, JSON or a Python literal, as JSON; None if the text is malformed."""
    return _json_of(text.strip(), frozenset(_KINDS))


def _kinds_of(schema: object, root: JsonSchema, seen: list[object]) -> Kinds:
    if not isinstance(schema, Mapping) or len(seen) >= _MOST_SCHEMAS:
        return _ANY
    seen.append(schema)
    found = [_own_kinds(schema)]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found.append(_kinds_of(_at(root, reference), root, seen))
    for name in ("anyOf", "oneOf"):
        choices = [_kinds_of(one, root, seen) for one in _list(schema.get(name))]
        found.append(_ANY if _ANY in choices else frozenset().union(*choices))
    found += [_kinds_of(one, root, seen) for one in _list(schema.get("allOf"))]
    said = [kinds for kinds in found if kinds]
    kinds = _both(said)
    return kinds | {"null"} if kinds and schema.get("nullable") is True else kinds


def _own_kinds(schema: Mapping[str, object]) -> Kinds:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else _list(given)
    kinds = frozenset(name for name in names if isinstance(name, str)) & {*_KINDS}
    if kinds:
        return kinds
    values = _list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    return frozenset(map(_kind, values))


def _both(said: Sequence[Kinds]) -> Kinds:
    # "number" includes integers
    kinds = _ANY
    for one in said:
        wide = one | {"integer"} if "number" in one else one
        kinds = (kinds & wide or kinds) if kinds else one
    return kinds


def _at(root: JsonSchema, reference: str) -> object:
    found: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if reference.startswith("#") else None


def _json_of(text: str, kinds: Kinds) -> str | None:
    """Return `text` as JSON; None if the JSON is not of the `kinds`."""
    word = _WORDS.get(text.lower())
    if word is not None:
        return word if _kind(json.loads(word)) in kinds else None
    for read in (_loaded, _evaluated):
        for value, written in read(text):
            if _allows(kinds, value) and not is_deeper_than(MAX_DEPTH, value):
                return written
    return None


def _loaded(text: str) -> Iterator[tuple[object, str]]:
    """Yield the value of `text` and its JSON."""
    try:
        value = json.loads(text, strict=False, parse_constant=refuse_constant)
        written = portable_json(value)
    except (ValueError, RecursionError):
        return
    is_portable = isinstance(value, int | float) or (text.isprintable() and "\\u" not in text)
    yield value, text if is_portable else written


def _evaluated(text: str) -> Iterator[tuple[object, str]]:
    # The literal may contain true, false and null.
    if len(text) > _LONGEST_LITERAL:
        return
    try:
        value = ast.literal_eval(_JsonWords().visit(ast.parse(text, mode="eval").body))
        yield value, portable_json(value)
    except _LITERAL_ERRORS:
        return


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def refuse_constant(constant: str) -> object:
    """Raise ValueError for NaN and Infinity, which only Python accepts in JSON."""
    raise ValueError(f"{constant} is not JSON")


def _allows(kinds: Kinds, value: object) -> bool:
    kind = _kind(value)
    return kind in kinds or (kind == "integer" and "number" in kinds) or _is_whole(kinds, value)


def _is_whole(kinds: Kinds, value: object) -> bool:
    return "integer" in kinds and isinstance(value, float) and value.is_integer()


def _kind(value: object) -> str:
    return _NAMES.get(type(value), "object")


def is_deeper_than(levels: int, value: object) -> bool:
    """Return whether the lists and objects in `value` have more than `levels` levels."""
    level = [value]
    for _ in range(levels + 1):
        level = [outer for outer in level if isinstance(outer, dict | list)]
        if not level:
            return False
        level = [child for outer in level for child in _children(outer)]
    return True


def portable_json(value: object) -> str:
    """Return JSON that any client can parse: without NaN or lone surrogates."""
    return replace_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _string(text: str) -> str:
    return portable_json(text)
