"""Converts the arguments of one call to JSON while the model writes them in its own spelling."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Final, Literal

from semantic.application.chat.argument_types import any_json
from semantic.domain.stop_strings import first_mark
from semantic.ports.chat import CallList

_LONGEST_KEY: Final = 256
_BARE_KEY: Final = re.compile(r"([{,]\s*)([^\s{}\[\],:\"']+)\s*:")
_SPACE: Final = re.compile(r"\s+")
_HEX: Final = "[0-9a-fA-F]"
_ESCAPE: Final = re.compile(rf"\\(?:[^0-7xuUN\n]|x{_HEX}{{2}}|u(?![dD][89a-fA-F]){_HEX}{{4}})")
_ESCAPE_START: Final = re.compile(rf"\\(?:x{_HEX}?|u(?![dD][89a-fA-F]){_HEX}{{0,3}})?")
_ESCAPED: Final = {
    "n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v",
    "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip

_Part = Literal["start", "string", "after", "other"]
"""A place in a call's arguments."""


class SpelledArguments(ABC):
    """Converts a call's arguments to JSON as their text arrives. A value that the model's parser
    refuses becomes a string."""

    def __init__(self) -> None:
        self.is_closed = False
        self.is_broken = False
        self.n_taken = 0
        self.n_ended = 0
        self._text = ""  # not read yet, from `_at` on
        self._at = 0
        self._n_read = 0  # characters of the source before `_text`
        self._certain = ["{"]
        self._has_members = False

    @property
    @abstractmethod
    def is_between(self) -> bool:
        """True if no argument is open."""

    @abstractmethod
    def may_end(self, *, cut: bool, stopped: bool) -> bool:
        """Return whether the arguments may end here. `cut` means that the answer reached a limit,
        `stopped` that it reached a stop string."""

    @abstractmethod
    def ending(self, *, at_mark: bool) -> str:
        """Return the JSON that ends an unfinished last argument, else "". `at_mark` says that the
        end mark of the tool calls follows the arguments."""

    @abstractmethod
    def _step(self) -> bool:
        """Read more text. Returns False if it needs more text."""

    def push(self, text: str) -> str:
        """Add `text`. Returns the JSON of the arguments that is now final."""
        self._text += text
        while not self.is_closed and not self.is_broken and self._step():
            pass
        self._n_read += self._at
        self._text, self._at = self._text[self._at :], 0
        return self._taken()

    def close(self) -> str:
        """Return the JSON that ends the arguments. No argument may be open."""
        self._end()
        return self._taken()

    def _end(self) -> None:
        self.n_taken = self._n_read + self._at
        self.is_closed = True
        self._certain.append("}")

    def _taken(self) -> str:
        certain = "".join(self._certain)
        self._certain.clear()
        return certain

    def _joined(self, members: str) -> str:
        return f", {members}" if members and self._has_members else members


class ListedArguments(SpelledArguments):
    """Reads the arguments of a call in the form of a list of keys and values."""

    def __init__(self, spelling: CallList) -> None:
        super().__init__()
        self._spelling = spelling
        # The open argument:
        self._key: str | None = None
        self._part: _Part = "start"
        self._written: list[str] = []
        self._sent: list[str] = []
        self._quote: str | None = None
        self._depth = 0

    @property
    def is_between(self) -> bool:
        return self._key is None and not self.is_broken and not self._text.strip()

    def may_end(self, *, cut: bool, stopped: bool) -> bool:
        return self.is_between and not cut and not stopped

    def ending(self, *, at_mark: bool) -> str:
        if not at_mark or self._key is None or self._quote is not None or self._text:
            return ""
        end = self._end_of_argument()
        return "" if end is None else end + "}"

    def _step(self) -> bool:
        return self._find_key() if self._key is None else self._read_value()

    # Keys

    def _find_key(self) -> bool:
        """Read a key or the list's end. Returns False if more text has to arrive."""
        spelling = self._spelling
        space = _SPACE.match(self._text, self._at)
        self._at = self._at if space is None else space.end()
        at, mark = first_mark((spelling.separator, spelling.close), self._text, self._at)
        key = self._text[self._at : at].strip()
        if len(key) > _LONGEST_KEY:
            self.is_broken = True
        if mark is None or self.is_broken:
            return False
        self._at = at + len(mark)
        found = spelling.key.fullmatch(key)
        if mark == spelling.separator and found is not None:
            self._key, self._part = found["key"], "start"
            return True
        self.is_broken = mark == spelling.separator or bool(key)
        if not self.is_broken:
            self._end()
        return False

    # Values

    def _read_value(self) -> bool:
        """Read more of a value. Returns False if more text has to arrive."""
        at, mark = first_mark(self._marks(), self._text, self._at)
        self._put(self._text[self._at : at])
        self._at = at
        if mark is None:
            return False
        if mark == "\\":
            return self._escape()
        self._at += len(mark)
        if self._depth == 0 and mark in (",", self._spelling.close):
            self._end_argument()
            if mark == self._spelling.close and not self.is_broken:
                self._end()
            return True
        self._enter(mark)
        return True

    def _marks(self) -> tuple[str, ...]:
        spelling = self._spelling
        escape = ("\\",) if spelling.escapes else ()
        if self._quote is not None:
            return (self._quote, *escape)
        return (*spelling.quotes, ",", spelling.close, *spelling.opening, *spelling.closing)

    def _enter(self, mark: str) -> None:
        if mark == self._quote:
            self._quote = None
            self._part = "after" if self._part == "string" else "other"
        elif mark in self._spelling.quotes:
            self._quote = mark
            self._part = "string" if self._part == "start" else "other"
        else:
            opens, closes = mark in self._spelling.opening, mark in self._spelling.closing
            self._depth = max(0, self._depth + opens - closes)
            self._part = "other"
        self._written.append(mark)

    def _put(self, text: str) -> None:
        self._written.append(text)
        if self._part == "string":
            self._send(text)
        elif text.strip():
            self._part = "other"

    def _escape(self) -> bool:
        """Read an escape. Returns False if more text has to arrive."""
        found = _ESCAPE.match(self._text, self._at)
        if found is None and _ESCAPE_START.fullmatch(self._text, self._at):
            return False
        escape = self._text[self._at : self._at + 2] if found is None else found.group()
        self._at += len(escape)
        self._written.append(escape)
        if found is None:
            self._part = "other"
        elif self._part == "string":
            self._send(_unescaped(escape))
        return True

    def _send(self, text: str) -> None:
        if not text:
            return
        if not self._sent:
            self._sent.append(self._member("")[:-1])
            self._certain.append(self._sent[0])
        self._sent.append(json.dumps(text, ensure_ascii=False)[1:-1])
        self._certain.append(self._sent[-1])

    def _end_argument(self) -> None:
        end = self._end_of_argument()
        self.is_broken = end is None
        self._certain.append(end or "")
        self.n_ended += 1
        self._has_members = True
        self._key, self._quote, self._depth = None, None, 0
        self._written, self._sent = [], []

    def _end_of_argument(self) -> str | None:
        # None if the argument contradicts the emitted JSON
        if self._part == "after":
            return '"' if self._sent else self._member("")
        value = "".join(self._written)
        found = _value(self._spelling, value)
        written = json.dumps(value.strip(), ensure_ascii=False) if found is None else found
        member = self._joined(f"{json.dumps(self._key, ensure_ascii=False)}: {written}")
        sent = "".join(self._sent)
        return member.removeprefix(sent) if member.startswith(sent) else None

    def _member(self, value: object) -> str:
        return self._joined(json.dumps({self._key: value}, ensure_ascii=False)[1:-1])


def _value(spelling: CallList, text: str) -> str | None:
    if spelling.escapes:
        return any_json(text)
    try:
        return any_json(_in_json(spelling, text))
    except ValueError:
        return None


def _in_json(spelling: CallList, text: str) -> str:
    written, quote = [], spelling.quotes[0]
    for number, part in enumerate(text.split(quote)):
        if number % 2:
            written.append(json.dumps(part, ensure_ascii=False))
        else:
            written.append(_BARE_KEY.sub(r'\1"\2":', part))
    if len(written) % 2 == 0:
        raise ValueError("a string is open")
    return "".join(written)


def _unescaped(escape: str) -> str:
    # An unknown escape stays unchanged.
    if escape[1] in "xu":
        return chr(int.from_bytes(bytes.fromhex(escape[2:]), "big"))
    return _ESCAPED.get(escape[1], escape)
