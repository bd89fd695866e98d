"""TaggedArguments: the arguments of a call that is written in tags, as JSON while they are written.

Decides how much of a value is certain. Knows tags as strings; the value of an argument is read by a
given function.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, Literal

from semantic.application.chat.answer_text import first_mark
from semantic.application.chat.spelled_arguments import SpelledArguments
from semantic.domain.errors import ToolCallError
from semantic.ports.chat import CallTags, WrittenCall

_PROBES: Final = ("1", "[]", "{}")
"""Values that stay themselves only where an argument is its text, whatever that is."""
_WORDS: Final = ("null", "none", "nil", "true", "false", "nan", "infinity")
"""Values that may be more than their text even then, in any case."""

_LONGEST_KEY: Final = 256
"""With a longer one an argument is read when it is complete."""
_N_BEFORE_VALUE: Final = 2
"""Parts of an argument before its value: what begins it, and its key."""

_State = Literal["between", "key", "value", "tail"]


class TaggedArguments(SpelledArguments):
    """The arguments of one call in tags, pushed in any pieces.

    A value that is its text is returned without what may be its end or white space that is no part
    of it.
    """

    def __init__(self, tags: CallTags, head: str, read: Callable[[str], list[WrittenCall]]) -> None:
        """`head` is what was written before the arguments, so that `read` can be given a call of
        one argument. It raises ToolCallError."""
        super().__init__()
        self._tags = tags
        self._head = head
        self._read = read
        self._state: _State = "between"
        self._are_texts: dict[str, bool] = {}
        self._argument: list[str] = []  # the open one as it was written, while that may be needed
        self._key: str | None = None
        self._value: _TextValue | None = None  # None if it is read when it is complete
        self._tail: list[str] = []  # of the value, if what follows does not end the call
        self._steps: dict[_State, Callable[[], bool]] = {
            "between": self._find_argument,
            "key": self._find_key,
            "value": self._read_value,
            "tail": self._read_tail,
        }

    @property
    def is_between(self) -> bool:
        """See `SpelledArguments.is_between`."""
        return self._state == "between" and not self.is_broken

    def may_end(self, *, cut: bool, stopped: bool) -> bool:
        """See `SpelledArguments.may_end`."""
        return self.is_between and not cut and not (stopped and self._tags.call_end)

    def ending(self, *, at_mark: bool) -> str:
        """See `SpelledArguments.ending`: only what ends the call follows the value."""
        is_at_end = at_mark and not self._tags.call_end and not self._text
        if self._state == "tail" or (self._state == "value" and is_at_end):
            end = self._end_of_argument()
            return "" if end is None else end + "}"
        return ""

    def _step(self) -> bool:
        return self._steps[self._state]()

    # Between arguments

    def _find_argument(self) -> bool:
        """Go to the next argument or the end of the call; False if it takes more text."""
        marks = [mark for mark in (self._tags.start, self._tags.call_end) if mark]
        at, mark = first_mark(marks, self._text, self._at)
        self._at = at
        if mark is None:
            return False
        self._at += len(mark)
        if mark == self._tags.call_end:
            self._end()
            return False
        self._state, self._argument = "key", [mark]
        return True

    def _find_key(self) -> bool:
        tags = self._tags
        at, mark = first_mark((tags.key_end, tags.end), self._text, self._at)
        is_long = at - self._at > _LONGEST_KEY
        if mark is None and not is_long:
            return False
        is_key = mark == tags.key_end and not is_long
        found = tags.key.fullmatch(self._text, self._at, at) if is_key else None
        self._state, self._key, self._value = "value", None, None
        if found is not None:
            self._argument.append(self._text[self._at : at] + tags.key_end)
            self._at = at + len(tags.key_end)
            self._key = found["key"]
            is_text = self._is_text("".join(self._argument))
            self._value = _TextValue(tags) if is_text else None
        return True

    def _is_text(self, begin: str) -> bool:
        """Whether an argument that begins so, with its key, is its text whatever its value is."""
        known = self._are_texts.get(begin)
        if known is None:
            probes = [probe for probe in _PROBES if not probe.startswith(self._tags.other)]
            known = all(self._members(begin + probe) == self._member(probe) for probe in probes)
            self._are_texts[begin] = known
        return known

    # Within an argument

    def _read_value(self) -> bool:
        """Read more of a value; False if it takes more text."""
        tags = self._tags
        ends = (tags.end, tags.call_end) if tags.call_end else (tags.end,)
        at, mark = first_mark(ends, self._text, self._at)
        self._put(self._text[self._at : at])
        self._at = at + len(mark or "")
        if mark == tags.end:
            self._end_argument()
        elif mark is not None:
            self._state, self._tail = "tail", [mark]
        return mark is not None

    def _read_tail(self) -> bool:
        """Read what follows an end of the call within a value: it is the value's, unless nothing
        else follows."""
        text = self._text[self._at :]
        rest = text.lstrip()
        self._tail.append(text[: len(text) - len(rest)])
        self._at = len(self._text) - len(rest)
        if not rest:
            return False
        self._state = "value"
        self._put("".join(self._tail))
        return True

    def _put(self, text: str) -> None:
        """Add to the value, and pass on what is certain of one that is its text."""
        value = self._value
        was_certain = value is not None and value.is_certain
        if not was_certain:
            self._argument.append(text)
        if value is None:
            return
        text = value.push(text)
        if not value.is_certain:
            return
        if not was_certain:
            self._certain.append(self._joined(self._member("")[:-1]))
            self._has_members = True
        self._certain.append(_characters(text))

    def _end_argument(self) -> None:
        self._state = "between"
        self.n_ended += 1
        end = self._end_of_argument()
        if end is None:
            self.is_broken = True
        elif end:
            self._certain.append(end)
            self._has_members = True

    def _end_of_argument(self) -> str | None:
        """The JSON that ends the open argument; None if it cannot be read."""
        if self._value is not None and self._value.is_certain:
            return '"'
        members = self._members("".join(self._argument))
        if members is None and self._key is not None:
            value = "".join(self._argument[_N_BEFORE_VALUE:])
            members = self._member(_trimmed(self._tags, value))
        return None if members is None else self._joined(members)

    def _member(self, value: str) -> str:
        return json.dumps({self._key: value}, ensure_ascii=False)[1:-1]

    def _members(self, written: str) -> str | None:
        """The JSON between the braces of a call with one argument; None if it cannot be read."""
        tags = self._tags
        try:
            calls = self._read(f"{self._head}{written}{tags.end}{tags.call_end}")
        except ToolCallError:
            return None
        return calls[0].arguments[1:-1] if len(calls) == 1 else None


class _TextValue:
    """The text of a value, pushed in any pieces, without what the format trims.

    `is_certain`: that it is its text is certain. Before, it may be a word that means something
    else, and nothing of it is returned.
    """

    def __init__(self, tags: CallTags) -> None:
        self.is_certain = False
        self._tags = tags
        self._has_begun = False
        self._is_other = False
        self._held = ""
        self._space: list[str] = []  # it may be no part of the value

    def push(self, text: str) -> str:
        """The text that is certain with more of it."""
        text = self._trim(text)
        if self.is_certain or self._is_other or not text:
            return text if self.is_certain else ""
        self._held += text
        self._is_other = self._held.startswith(self._tags.other)
        if self._is_other or self._may_be_other():
            return ""
        self.is_certain = True
        return self._held

    def _may_be_other(self) -> bool:
        word = self._held.lower()
        return any(other.startswith(word) for other in _WORDS) or any(
            other.startswith(self._held) for other in self._tags.other
        )

    def _trim(self, text: str) -> str:
        """`text` without what begins or may end the value; the latter is kept for what follows."""
        trims = self._tags.trims
        if trims == "nothing" or not text:
            return text
        if not self._has_begun:
            text = text.lstrip() if trims == "space" else text.removeprefix("\n")
            self._has_begun = bool(text) or trims == "line"
        if trims == "space" and not text.strip():
            self._space.append(text)
            return ""
        text = "".join(self._space) + text
        kept = text.rstrip() if trims == "space" else text.removesuffix("\n")
        self._space = [text[len(kept) :]]
        return kept


def _trimmed(tags: CallTags, text: str) -> str:
    """The text of a whole value."""
    match tags.trims:
        case "space":
            return text.strip()
        case "line":
            return text.removeprefix("\n").removesuffix("\n")
        case "nothing":
            return text


def _characters(text: str) -> str:
    """`text` within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
