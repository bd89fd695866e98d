"""Settings of a client as a tree of tables, and what it takes to put ours among a user's.

Knows no file and no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from semantic.domain.errors import InvalidRequestError

Scalar: TypeAlias = str | int | bool
Settings: TypeAlias = Mapping[str, "Scalar | Settings | None"]
"""What must hold. None: the setting must not be there."""
Document: TypeAlias = dict[str, object]
"""What a file holds."""

_SECRET: Final = frozenset({"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "apiKey", "apiKeyHelper"})
MASK: Final = "********"


@dataclass(frozen=True, slots=True)
class Change:
    """One setting by its path: its value before and after, None where there is none."""

    path: tuple[str, ...]
    was: object
    becomes: Scalar | None

    @property
    def shown_was(self) -> object:
        """The value before, as others may read it: a key or password of the user's is masked."""
        if self.was is None or isinstance(self.was, bool | int | float):
            return self.was
        if not isinstance(self.was, str) or self.path[-1] in _SECRET or "@" in self.was:
            return MASK
        return self.was


def changes(document: Mapping[str, object], wanted: Settings) -> list[Change]:
    """What differs between `document` and `wanted`, in the order of `wanted`.

    Raises InvalidRequestError where the document has a value and a table is needed.
    """
    return list(_changes(document, wanted, ()))


def _changes(
    document: Mapping[str, object], wanted: Settings, path: tuple[str, ...]
) -> Iterator[Change]:
    for name, value in wanted.items():
        here = (*path, name)
        was = document.get(name)
        if isinstance(value, Mapping):
            if was is not None and not isinstance(was, Mapping):
                raise InvalidRequestError(
                    f"{'.'.join(here)} holds {type(was).__name__}: expected a table of settings"
                )
            yield from _changes(was or {}, value, here)
        elif was != value or type(was) is not type(value):
            yield Change(here, was, value)


def applied(document: Mapping[str, object], wanted: Settings) -> Document:
    """A copy of `document` in which `wanted` holds, and all else stays."""
    result = dict(document)
    for name, value in wanted.items():
        if isinstance(value, Mapping):
            was = result.get(name)
            below = applied(was if isinstance(was, Mapping) else {}, value)
            if below or name in result:
                result[name] = below
        elif value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result
