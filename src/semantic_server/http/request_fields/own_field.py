"""The field `semantic` of a body, the same on every wire, and the headers of its members.

A member is read from the body, else from the header `X-Semantic-` and its name. Knows their types;
not what the engine does with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Final

from fastapi import Request

from semantic.domain.identity import LONGEST_ABSENCE, MOST_PRIORITY, Hints
from semantic_server.http.errors import FieldError

_OWN_FIELD: Final = "semantic"
_KEEP, _DONE, _BACK_IN, _PRIORITY = "keep", "done", "back_in", "priority"
_MEMBERS: Final = (_KEEP, _DONE, _BACK_IN, _PRIORITY)
_HEADERS: Final = {name: f"X-Semantic-{name.title().replace('_', '-')}" for name in _MEMBERS}
_FLAGS: Final = {"true": True, "false": False}
_LONGEST_NAME: Final = 80


def keep_of(request: Request, body: Mapping[str, object]) -> bool:
    """Whether anything of the request may stay after its end: False if either the header
    X-Semantic-Keep or the field `semantic.keep` is false.

    Raises FieldError for another value than true or false, for an unknown member of `semantic`,
    which a misspelt one would be, and as `hints_of`, also where hints have no effect.
    """
    hints_of(request, body)
    own = _own(body)
    return _header_flag(request, _KEEP) is not False and _flag(own, _KEEP) is not False


def hints_of(request: Request, body: Mapping[str, object]) -> Hints:
    """What the agent says of itself. Raises FieldError for a value of another type or out of range,
    for an unknown member of `semantic`, and for `back_in` of an agent that is done."""
    own = _own(body)
    done = _flag(own, _DONE)
    if done is None:
        done = _header_flag(request, _DONE) or False
    back_in = _seconds(request, own)
    if done and back_in is not None:
        path = f"{_OWN_FIELD}.{_BACK_IN}"
        raise FieldError(f"{path}: expected nothing beside {_OWN_FIELD}.{_DONE}", param=path)
    return Hints(done, back_in, _priority(request, own))


def _own(body: Mapping[str, object]) -> Mapping[str, object]:
    own = body.get(_OWN_FIELD)
    if own is None:
        return {}
    if not isinstance(own, dict):
        raise FieldError(f"{_OWN_FIELD}: expected an object", param=_OWN_FIELD)
    for name in own:
        if name not in _MEMBERS:
            path = f"{_OWN_FIELD}.{name[:_LONGEST_NAME]}"
            known = f"{', '.join(_MEMBERS[:-1])} or {_MEMBERS[-1]}"
            raise FieldError(f"{path}: there is no such field; expected {known}", param=path)
    return own


def _flag(own: Mapping[str, object], name: str) -> bool | None:
    value = own.get(name)
    if not isinstance(value, bool | None):
        path = f"{_OWN_FIELD}.{name}"
        raise FieldError(f"{path}: expected true or false", param=path)
    return value


def _header_flag(request: Request, name: str) -> bool | None:
    text = request.headers.get(_HEADERS[name])
    if text is not None and text.lower() not in _FLAGS:
        raise FieldError(f"{_HEADERS[name]}: expected true or false", param=_HEADERS[name])
    return None if text is None else _FLAGS[text.lower()]


def _seconds(request: Request, own: Mapping[str, object]) -> float | None:
    value, label = _number(request, own, _BACK_IN)
    if value is None or 0 <= value <= LONGEST_ABSENCE:
        return None if value is None else float(value)
    raise FieldError(
        f"{label}: expected a number of seconds from 0 to {LONGEST_ABSENCE:.0f}", param=label
    )


def _priority(request: Request, own: Mapping[str, object]) -> int:
    value, label = _number(request, own, _PRIORITY)
    if value is None or value in range(-MOST_PRIORITY, MOST_PRIORITY + 1):
        return int(value or 0)
    raise FieldError(
        f"{label}: expected an integer from {-MOST_PRIORITY} to {MOST_PRIORITY}", param=label
    )


def _number(request: Request, own: Mapping[str, object], name: str) -> tuple[float | None, str]:
    """A member and where it stands; None without one, not a number for anything else."""
    value, label = own.get(name), f"{_OWN_FIELD}.{name}"
    if value is None:
        label = _HEADERS[name]
        value = request.headers.get(label)
        return (None if value is None else _parsed(value)), label
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value, label
    return nan, label


def _parsed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return nan
