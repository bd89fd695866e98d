"""Field tables: which fields of a body a wire supports, ignores and refuses by name.

Of fields in no table those that look like a known one are refused, others logged once. Knows names
and JSON types; not what a field means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.logs import WarnOnce
from semantic.adapters.http.request_body import check_spelling

_LONGEST_NAME: Final = 80


@dataclass(frozen=True, slots=True)
class Field:
    """Support for one field. With a `refusal` only the values in `unless` are accepted."""

    refusal: str | None = None
    unless: tuple[object, ...] = ()

    def accepts(self, value: object) -> bool:
        """True if a request may contain this `value`."""
        return self.refusal is None or any(
            type(value) is type(one) and value == one for one in self.unless
        )


SUPPORTED: Final = Field()

IGNORED: Final = Field()
"""Accepted without effect: accounting tags and hints that change no answer."""


def refused(refusal: str, *unless: object) -> Field:
    """A field of which only the values in `unless` are accepted."""
    return Field(refusal, unless)


def fields_of(
    body: Mapping[str, object],
    table: Mapping[str, Field],
    others: Mapping[str, Field],
    warnings: WarnOnce,
    within: str = "",
) -> dict[str, object]:
    """The fields of `body` that are in the table and not null.

    `others` are fields of other servers and wires, where the table lacks them. `within` is the path
    prefix of a nested `body`. Raises FieldError for a refused field, and for one that is spelled
    like a known one.
    """
    given = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(given.keys() - table.keys())
    for name in unknown:
        _check(within + name, given[name], others.get(name, IGNORED))
    unknown = [name for name in unknown if name not in others]
    check_spelling(unknown, table, within)
    for name in unknown:
        warnings.warn(f"field {within + name!a:.{_LONGEST_NAME}} is unknown and has no effect")
    known = {name: value for name, value in given.items() if name in table}
    for name, value in known.items():
        _check(within + name, value, table[name])
    return known


def _check(path: str, value: object, field: Field) -> None:
    if field.accepts(value):
        return
    allowed = " or ".join(repr(one) for one in field.unless)
    hint = f"; only {allowed} is accepted" if allowed else ""
    raise FieldError(f"{path}: {field.refusal}{hint}", param=path)
