"""The field `semantic` of a body, the same on every wire, and the headers of its members.

A member is read from the body, else from the header `X-Semantic-` and its name. Knows their types;
not what the engine does with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastapi import Request

from semantic.adapters.http.errors import FieldError
from semantic.domain.identity import LONGEST_ABSENCE, Hints

_OWN_FIELD: Final = "semantic"
_KEEP, _DONE, _BACK_IN = "keep", "done", "back_in"
_MEMBERS: Final = (_KEEP, _DONE, _BACK_IN)
_HEADERS: Final = {name: f"X-Semantic-{name.title().replace('_', '-')}" for name in _MEMBERS}
_FLAGS: Final = {"true": True, "false": False}
_LONGEST_NAME: Final = 80


def keep_of(request: Request, body: Mapping[str, object]) -> bool:
    """Whether anything of the request may stay after its end: False if either the header
    X-Semantic-Keep or the field `semantic.keep` is false.

    Raises FieldError for another value than true or false, and for an unknown member of `semantic`,
    which a misspelt one would be.
    """
    own = _own(body)
    return _header_flag(request, _KEEP) is not False and _flag(own, _KEEP) is not False


def hints_of(request: Request, body: Mapping[str, object]) -> Hints:
    """What the agent says of itself. Raises FieldError as `keep_of`, and for `back_in` of an agent
    that is done."""
    own = _own(body)
    done = _flag(own, _DONE)
    if done is None:
        done = _header_flag(request, _DONE) or False
    back_in = _seconds(request, own)
    if done and back_in is not None:
        path = f"{_OWN_FIELD}.{_BACK_IN}"
        raise FieldError(f"{path}: expected nothing beside {_OWN_FIELD}.{_DONE}", param=path)
    return Hints(done, back_in)


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
    value, label = own.get(_BACK_IN), f"{_OWN_FIELD}.{_BACK_IN}"
    if value is None and (text := request.headers.get(_HEADERS[_BACK_IN])) is not None:
        value, label = _number(text), _HEADERS[_BACK_IN]
    elif value is None:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if 0 <= number <= LONGEST_ABSENCE:
        return float(number)
    raise FieldError(
        f"{label}: expected a number of seconds from 0 to {LONGEST_ABSENCE:.0f}", param=label
    )


def _number(text: str) -> float | None:
    """The number in a header; None for any other text."""
    try:
        return float(text)
    except ValueError:
        return None
