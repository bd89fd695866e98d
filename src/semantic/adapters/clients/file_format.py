"""The two formats of clients' files: how a text is read, and changed without losing anything.

What is written is read again and compared: all that was there before is still there, or nothing
is written.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, MutableMapping
from typing import Final, Protocol

from semantic.adapters.clients.settings_tree import Document, Settings, applied
from semantic.domain.errors import InvalidRequestError

_INDENT: Final = re.compile(r'\n([ \t]+)"')
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class UnreadableError(InvalidRequestError):
    """A text is not of its format, or cannot be changed without losing some of it."""


class FileFormat(Protocol):
    """Both methods raise UnreadableError, with what was expected."""

    def read(self, text: str) -> Document:
        """What the text says."""
        ...

    def change(self, text: str, wanted: Settings) -> str:
        """The text in which `wanted` holds."""
        ...


class Json:
    """JSON without comments, as its standard has it."""

    def read(self, text: str) -> Document:
        """See `FileFormat.read`. A name that stands twice is refused: one of them would be lost."""
        if not text.strip():
            return {}
        try:
            document: object = json.loads(
                text, object_pairs_hook=_without_doubles, parse_constant=_refuse_constant
            )
        except UnreadableError:
            raise
        except ValueError as error:
            raise UnreadableError(f"expected JSON without comments: {error}") from None
        if not isinstance(document, dict):
            raise UnreadableError(f"expected a JSON object, got {type(document).__name__}")
        return document

    def change(self, text: str, wanted: Settings) -> str:
        """See `FileFormat.change`. The file's own indentation is kept."""
        document = applied(self.read(text), wanted)
        found = _INDENT.search(text)
        try:
            written = json.dumps(
                document, indent=found[1] if found else 2, ensure_ascii=False, allow_nan=False
            )
        except ValueError:
            raise UnreadableError("it has a number that is too large to be kept") from None
        written = _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", written)
        return _checked(self, written + "\n", document)


class Toml:
    """TOML, with the comments and the layout that its owner gave it."""

    def read(self, text: str) -> Document:
        """See `FileFormat.read`."""
        try:
            return tomllib.loads(text)
        except ValueError as error:
            raise UnreadableError(f"expected TOML: {error}") from None

    def change(self, text: str, wanted: Settings) -> str:
        """See `FileFormat.change`."""
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        expected = applied(self.read(text), wanted)
        try:
            document = tomlkit.parse(text)
            _put(document, wanted)
            written = tomlkit.dumps(document)
        except (TOMLKitError, ValueError) as error:
            raise UnreadableError(f"its layout cannot be kept: {error}") from None
        return _checked(self, written, expected)


JSON: Final = Json()
TOML: Final = Toml()


def _put(table: MutableMapping[str, object], wanted: Settings) -> None:
    """Set values in place: what is not named keeps its place and its comments."""
    for name, value in wanted.items():
        if value is None:
            table.pop(name, None)
        elif not isinstance(value, Mapping):
            if name not in table or table[name] != value:
                table[name] = value
        else:
            below = table.get(name)
            if isinstance(below, MutableMapping):
                _put(below, value)
            else:
                new = _new_table(table, value)
                _put(new, value)
                table[name] = new


def _new_table(around: object, wanted: Settings) -> MutableMapping[str, object]:
    import tomlkit
    from tomlkit.items import InlineTable

    if isinstance(around, InlineTable):
        return tomlkit.inline_table()
    # Without values of its own a table needs no heading.
    return tomlkit.table(is_super_table=all(map(_is_table, wanted.values())))


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


def _checked(kind: FileFormat, written: str, expected: Document) -> str:
    if _canonical(kind.read(written)) != _canonical(expected):
        raise UnreadableError("its layout is such that other settings would be lost")
    return written


def _canonical(document: Document) -> str:
    return json.dumps(document, sort_keys=True, default=repr)


def _without_doubles(pairs: list[tuple[str, object]]) -> Document:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise UnreadableError(f"{double!r:.80} stands twice in one object")
    return found


def _refuse_constant(name: str) -> object:
    raise UnreadableError(f"{name} is no JSON")
