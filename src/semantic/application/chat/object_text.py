"""ObjectText: checks the text of a JSON object while the model writes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Final, Literal

MAX_DEPTH: Final = 50
"""The maximum number of levels of lists and objects."""

_SPACE: Final = re.compile(r"[ \t\n\r]+")
_CHARACTERS: Final = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE: Final = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_START: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_HIGH: Final = re.compile(r"\\u[dD][89abAB]")
_LOW: Final = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LOW_START: Final = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")
_PLAIN: Final = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LONGEST_NUMBER: Final = 400
_NO_CHARACTER: Final = r"\ufffd"
"""Replaces half a surrogate pair, which some clients cannot read."""

_Next = Literal["object", "value", "first item", "key", "first key", "colon", "comma"]


class ObjectText:
    """Checks the text of one JSON object as it arrives. Joined, the results of `push` are the
    object's text up to its closing brace. After an error, `is_broken` is True."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False
        self.n_taken = 0
        self._text = ""  # not read yet
        self._at = 0
        self._n_read = 0  # characters of the source before `_text`
        self._pending = ""  # read, but not certain before a value follows
        self._certain: list[str] = []
        self._closers: list[str] = []
        self._next: _Next = "object"
        self._string: Literal["key", "value"] | None = None
        self._has_members = False
        # Each reads the token that begins with the given character; closing brackets are handled
        # before.
        self._readers: dict[_Next, Callable[[str], bool]] = {
            "object": self._read_object,
            "value": self._read_value,
            "first item": self._read_value,
            "key": self._read_key,
            "first key": self._read_key,
            "colon": self._read_colon,
            "comma": self._read_comma,
        }

    def push(self, text: str) -> str:
        """Add `text`. Returns the part of the object that is now final."""
        self._text += text
        while not self.is_closed and not self.is_broken and self._at < len(self._text):
            step = self._between if self._string is None else self._within
            if not step():
                break
        self._n_read += self._at
        self._text, self._at = self._text[self._at :], 0
        certain = "".join(self._certain)
        self._certain.clear()
        return certain

    def closing(self, name: str | None = None, value: str = "") -> str:
        """Return the text that closes the object. If `name` is given, adds a last member."""
        end = '"' if self._string == "value" else ""
        end += "".join(reversed(self._closers[1:]))
        if not self._closers:
            end += "{"
        if name is None:
            return end + "}"
        return end + (", " if self._has_members else "") + _member(name, value) + "}"

    def reopening(self, name: str, value: str) -> str:
        """Return the text that replaces the object's closing brace to add a member."""
        return (", " if self._has_members else "") + _member(name, value) + "}"

    # Within strings

    def _within(self) -> bool:
        """Read more of a string. Returns False if the string needs more text."""
        found = _CHARACTERS.match(self._text, self._at)
        if found is not None:
            return self._in_string(found.group(), found.group())
        first = self._text[self._at]
        if first == '"':
            return self._end_string()
        if first == "\\":
            return self._escape()
        return self._in_string(first, json.dumps(first)[1:-1])

    def _in_string(self, source: str, written: str) -> bool:
        self._at += len(source)
        if self._string == "key":
            self._pending += written
        else:
            self._emit(written)
        return True

    def _end_string(self) -> bool:
        was_key = self._string == "key"
        self._in_string('"', '"')
        self._string, self._next = None, "colon" if was_key else "comma"
        return True

    def _escape(self) -> bool:
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            if _ESCAPE_START.fullmatch(self._text, self._at):
                return False
            return self._break()
        escape = found.group()
        if not _HIGH.match(escape):
            return self._in_string(escape, _NO_CHARACTER if _LOW.match(escape) else escape)
        low = _LOW.match(self._text, found.end())
        if low is None and _LOW_START.fullmatch(self._text, found.end()):
            return False
        pair = escape if low is None else escape + low.group()
        return self._in_string(pair, _NO_CHARACTER if low is None else pair)

    # Between strings

    def _between(self) -> bool:
        """Read the next token. Returns False if the token needs more text."""
        space = _SPACE.match(self._text, self._at)
        if space is not None:
            return self._wait(space.group(), self._next)
        first = self._text[self._at]
        if self._closers and first == self._closers[-1] and self._may_close():
            return self._close(first)
        return self._readers[self._next](first)

    def _may_close(self) -> bool:
        return self._next in ("comma", "first key", "first item")

    def _read_object(self, first: str) -> bool:
        return self._open("}") if first == "{" else self._break()

    def _read_key(self, first: str) -> bool:
        if first != '"':
            return self._break()
        self._string = "key"
        return self._wait(first, self._next)

    def _read_colon(self, first: str) -> bool:
        return self._wait(first, "value") if first == ":" else self._break()

    def _read_comma(self, first: str) -> bool:
        if first != ",":
            return self._break()
        return self._wait(first, "key" if self._closers[-1] == "}" else "value")

    def _read_value(self, first: str) -> bool:
        if first == '"':
            self._string = "value"
            return self._take(first, "comma")
        if first in "{[":
            return self._open("}" if first == "{" else "]")
        return self._read_plain()

    def _read_plain(self) -> bool:
        found = _PLAIN.match(self._text, self._at)
        if found is None:
            return self._break()
        if found.end() == len(self._text):
            return False if len(found.group()) <= _LONGEST_NUMBER else self._break()
        if not _is_plain_value(found.group()):
            return self._break()
        return self._take(found.group(), "comma")

    def _open(self, closer: str) -> bool:
        if len(self._closers) >= MAX_DEPTH:
            return self._break()
        self._closers.append(closer)
        first = self._text[self._at]
        taken = self._take(first, "first key" if closer == "}" else "first item")
        self._has_members = len(self._closers) > 1
        return taken

    def _close(self, closer: str) -> bool:
        self._closers.pop()
        self._take(closer, "comma")
        self.is_closed = not self._closers
        return True

    # The certain part

    def _take(self, token: str, following: _Next) -> bool:
        self._at += len(token)
        self._next = following
        self._has_members = True
        self._emit(token)
        return True

    def _wait(self, token: str, following: _Next) -> bool:
        self._at += len(token)
        self._next = following
        self._pending += token
        return True

    def _emit(self, written: str) -> None:
        self._certain.append(self._pending + written)
        self._pending = ""
        self.n_taken = self._n_read + self._at

    def _break(self) -> bool:
        self.is_broken = True
        return True


def _member(name: str, value: str) -> str:
    return json.dumps({name: value}, ensure_ascii=False)[1:-1]


def _is_plain_value(text: str) -> bool:
    if text in ("true", "false", "null"):
        return True
    is_number = len(text) <= _LONGEST_NUMBER and _NUMBER.fullmatch(text) is not None
    return is_number and math.isfinite(float(text))
