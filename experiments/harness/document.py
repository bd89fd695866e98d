"""Typed reading of JSON: each field is read with its expected type.

Knows no schema. Every error is a ResultError that names the field by its full path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias, TypeGuard

Scalar: TypeAlias = bool | int | float | str | None
Json: TypeAlias = Scalar | list["Json"] | dict[str, "Json"]


class ResultError(ValueError):
    """A result does not follow its schema, or a report does not fit its result."""


class Document:
    """One JSON object, read field by field."""

    def __init__(self, value: Json, path: str = "") -> None:
        self._path = path
        if not isinstance(value, dict):
            raise ResultError(f"{path or 'document'}: expected an object, got {_kind(value)}")
        self._fields = value

    def only(self, known: Iterable[str]) -> None:
        """Refuse fields that the schema does not have: a misspelt one must not get lost."""
        unknown = sorted(set(self._fields) - set(known))
        if unknown:
            raise ResultError(f"{self._name(unknown[0])}: unknown field")

    def text(self, key: str) -> str:
        """A string that says something."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        if not value.strip():
            raise ResultError(f"{self._name(key)}: empty")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or null."""
        return None if self._value(key) is None else self.text(key)

    def flag(self, key: str) -> bool:
        """True or false, nothing that merely counts as such."""
        value = self._value(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def integer(self, key: str) -> int:
        """A whole number."""
        value = self._value(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer", value)
        return value

    def scalar(self, key: str) -> Scalar:
        """A finite number, a string, true, false or null."""
        value = self._value(key)
        if not is_scalar(value):
            raise self._wrong(key, "a finite number, a string, true, false or null", value)
        return value

    def tree(self, key: str) -> dict[str, Json]:
        """An object of any depth with something in it; every leaf must be a scalar."""
        value = self._value(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        if not value:
            raise ResultError(f"{self._name(key)}: empty")
        _check_leaves(value, self._name(key))
        return value

    def scalars(self, key: str) -> dict[str, Scalar]:
        """An object of scalars; it may be empty."""
        return self.child(key).all_scalars()

    def rows(self, key: str) -> tuple[dict[str, Scalar], ...]:
        """A list of at least one object of scalars."""
        value = self._value(key)
        if not isinstance(value, list) or not value:
            raise self._wrong(key, "a list with at least one entry", value)
        name = self._name(key)
        rows = (Document(row, f"{name}[{index}]") for index, row in enumerate(value))
        return tuple(row.all_scalars() for row in rows)

    def texts(self, key: str) -> dict[str, str]:
        """An object of strings."""
        child = self.child(key)
        return {name: child.text(name) for name in child._fields}

    def child(self, key: str) -> Document:
        """The object in this field."""
        return Document(self._value(key), self._name(key))

    def all_scalars(self) -> dict[str, Scalar]:
        """Every field of this object, each a scalar."""
        return {key: self.scalar(key) for key in self._fields}

    def _value(self, key: str) -> Json:
        if key not in self._fields:
            raise ResultError(f"{self._name(key)}: missing")
        return self._fields[key]

    def _name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _wrong(self, key: str, expected: str, value: Json) -> ResultError:
        return ResultError(f"{self._name(key)}: expected {expected}, got {_kind(value)}")


def is_scalar(value: Json) -> TypeGuard[Scalar]:
    """Whether a value is a leaf that compares and prints without surprises."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _check_leaves(value: Json, path: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_leaves(inner, f"{path}[{index}]")
    elif not is_scalar(value):
        raise ResultError(f"{path}: expected a finite number, got {value}")


def _kind(value: Json) -> str:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    return {str: "a string", list: "a list", dict: "an object"}[type(value)]
