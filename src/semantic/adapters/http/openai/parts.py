"""Parts of a body that are read one by one: each must be an object, and says where it stands.

Knows JSON values and paths; not what a part means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import TypeAdapter

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.request_body import validated

T = TypeVar("T")


def object_at(path: str, value: object) -> dict[str, object]:
    """`value` without its nulls. Raises FieldError unless it is a JSON object."""
    if not isinstance(value, dict):
        raise FieldError(f"{path}: expected an object", param=path)
    return {name: inner for name, inner in value.items() if inner is not None}


def list_at(path: str, value: object) -> Sequence[object]:
    """Raises FieldError unless `value` is a list."""
    if not isinstance(value, list):
        raise FieldError(f"{path}: expected a list", param=path)
    return value


def text_at(path: str, value: object) -> str:
    """Raises FieldError unless `value` is a text."""
    if not isinstance(value, str):
        raise FieldError(f"{path}: expected a text", param=path)
    return value


def validated_at(path: str, adapter: TypeAdapter[T], part: Mapping[str, object]) -> T:
    """`part` as `adapter` knows it. Raises FieldError with the path from the body's beginning."""
    try:
        return validated(adapter, part)
    except FieldError as error:
        whole = f"{path}.{error.param}" if error.param else path
        problem = str(error).removeprefix(f"{error.param}: ")
        raise FieldError(f"{whole}: {problem}", param=whole) from error
