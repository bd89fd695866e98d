"""TaggedArguments: converts a call's arguments in tags to JSON while the model writes them.

An end tag ends a value only if an argument or the call's end follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, Literal

from semantic.application.chat.argument_types import ArgumentTypes
from semantic.application.chat.spelled_arguments import SpelledArguments
from semantic.domain.stop_strings import first_mark
from semantic.ports.chat import CallTags

_LONGEST_KEY: Final = 256
"""The maximum length in characters of a key, and of white space between two arguments."""
_BLANK: Final = re.compile(r"(?:\s|\\n)*")
"""White space between arguments; some models write a line break as two characters."""

_State = Literal["between", "key", "value", "end"]


class TaggedArguments(SpelledArguments):
    """Reads the arguments of one call in tags as their text arrives."""

    def __init__(self, tags: CallTags, types: ArgumentTypes) -> None:
        super().__init__()
        self._tags = tags
        self._types = types
        self._state: _State = "between"
        self._value = _Value(tags, "", is_text=False)
        self._seen: set[str] = set()
        self._steps: dict[_State, Callable[[], bool]] = {
            "between": self._find_argument,
            "key": self._find_key,
            "value": self._read_value,
            "end": self._read_end,
        }

    @property
    def is_between(self) -> bool:
        at_end = self._state == "end" and _BLANK.fullmatch(self._text) is not None
        return self._state == "between" or at_end

    def may_end(self, *, cut: bool, stopped: bool) -> bool:
        return self.is_between and not cut and not (stopped and self._tags.call_end)

    def close(self) -> str:
        if self._state == "end":
            self._end_argument()
        return super().close()

    def ending(self, *, at_mark: bool) -> str:
        """See `SpelledArguments.ending`."""
        if self._state != "value" or self._text:
            return ""
        cut = self._value.without_call_end()
        if cut is None and not (at_mark and not self._tags.call_end):
            return ""
        return self._rest_of_value(cut) + "}"

    def _step(self) -> bool:
        return self._steps[self._state]()

    # Between arguments

    def _find_argument(self) -> bool:
        """Read up to the next argument. Returns False if more text has to arrive."""
        marks = [mark for mark in (self._tags.start, self._tags.call_end) if mark]
        at, mark = first_mark(marks, self._text, self._at)
        self._at = at
        if mark is None:
            return False
        self._at += len(mark)
        if mark == self._tags.call_end:
            self._end()
            return False
        self._state = "key"
        return True

    def _find_key(self) -> bool:
        found = self._key_at(self._at)
        if found is None:
            return False
        self._state = "between"
        if found:
            self._at = found.end() + len(self._tags.key_end)
            self._state, kind = "value", found.groupdict().get("kind")
            is_text = self._types.is_text(found["key"]) if kind is None else kind in _TEXTS
            self._value = _Value(
                self._tags, found["key"], is_text=is_text, is_json=kind is not None
            )
            self._seen.add(found["key"])
        return True

    def _key_at(self, at: int) -> re.Match[str] | Literal[False] | None:
        """Return the match of a key. False if the key is missing, None if the text is too short."""
        tags = self._tags
        near = self._text[at : at + _LONGEST_KEY]
        end, mark = first_mark((tags.key_end, tags.end), near)
        if mark is None:
            return False if len(near) == _LONGEST_KEY else None
        return (mark == tags.key_end and tags.key.fullmatch(self._text, at, at + end)) or False

    # Within an argument

    def _read_value(self) -> bool:
        """Read more of a value. Returns False if more text has to arrive."""
        at, mark = first_mark((self._tags.end,), self._text, self._at)
        self._put(self._text[self._at : at])
        self._at = at + len(mark or "")
        if mark is not None:
            self._state = "end"
        return mark is not None

    def _read_end(self) -> bool:
        """Read the end of a value. Returns False if more text has to arrive."""
        blank = _BLANK.match(self._text, self._at)
        at = self._at if blank is None else blank.end()
        is_far = at - self._at > _LONGEST_KEY
        is_end = False if is_far or self._value.is_wrapped else self._ends_value(at)
        if is_end is None:
            return False
        if is_end:
            self._end_argument()
            self._state = "between"
        else:
            self._state = "value"
            self._put(self._tags.end)
        return True

    def _ends_value(self, at: int) -> bool | None:
        """Return whether the value ends here; None if more text has to arrive."""
        tags = self._tags
        marks = [mark for mark in (tags.start, tags.call_end) if mark]
        near = self._text[at : at + max(map(len, marks))]
        begins = any(len(near) < len(mark) and mark.startswith(near) for mark in marks)
        if begins or near == "\\":  # a blank may follow
            return None
        if tags.call_end and near.startswith(tags.call_end):
            return True
        if not near.startswith(tags.start):
            return False
        found = self._key_at(at + len(tags.start))
        if not found:
            return found
        return found["key"] not in self._seen

    def _put(self, text: str) -> None:
        more = self._value.push(text)
        if more and not self._value.is_sent:
            self._value.is_sent = True
            self._certain.append(self._joined(self._member('""')[:-1]))
            self._has_members = True
        self._certain.append(_characters(more))

    def _end_argument(self) -> None:
        self.n_ended += 1
        self._certain.append(self._rest_of_value(None))
        self._has_members = True

    def _rest_of_value(self, cut: str | None) -> str:
        value = self._value
        text = value.rest if cut is None else cut
        if value.is_sent:
            return _characters(text) + '"'
        if value.is_text:
            return self._joined(self._member(json.dumps(text, ensure_ascii=False)))
        if value.is_json:
            return self._joined(self._member(self._types.json(text)))
        return self._joined(self._member(self._types.value(value.key, text)))

    def _member(self, value: str) -> str:
        return f"{json.dumps(self._value.key, ensure_ascii=False)}: {value}"


_TEXTS: Final = ("true", "string")
"""The kinds in a tag that declare a text."""


class _Value:
    # `is_text`: the value is text, even if it looks like JSON.

    def __init__(self, tags: CallTags, key: str, *, is_text: bool, is_json: bool = False) -> None:
        self.key = key
        self.is_text = is_text
        self.is_json = is_json and not is_text
        self.is_sent = False
        self._tags = tags
        self._text = ""  # not emitted yet
        self._drops_line = tags.trims == "line"

    def push(self, text: str) -> str:
        if self._drops_line and text:
            text, self._drops_line = text.removeprefix("\n"), False
        self._text += text
        if not self.is_text or self._may_be_wrapped:
            return ""
        at = self._n_certain
        certain, self._text = self._text[:at], self._text[at:]
        return certain

    @property
    def rest(self) -> str:
        return self._trimmed(self._text)

    @property
    def is_wrapped(self) -> bool:
        begin, end = self._tags.wrap
        return bool(begin) and self._text.lstrip().startswith(begin) and end not in self._text

    def without_call_end(self) -> str | None:
        end, text = self._tags.call_end, self._text.rstrip()
        return self._trimmed(text.removesuffix(end)) if end and text.endswith(end) else None

    def _trimmed(self, text: str) -> str:
        begin, end = self._tags.wrap
        inner = text.strip()
        if begin and not self.is_sent and inner.startswith(begin) and inner.endswith(end):
            return inner.removeprefix(begin).removesuffix(end)
        return text.removesuffix("\n") if self._tags.trims == "line" else text

    @property
    def _may_be_wrapped(self) -> bool:
        begin, text = self._tags.wrap[0], self._text.lstrip()
        may_begin = text.startswith(begin) or begin.startswith(text)
        return bool(begin) and not self.is_sent and may_begin

    @property
    def _n_certain(self) -> int:
        end, text = self._tags.call_end, self._text
        at = len(text)
        bare = text.rstrip()
        if end and bare.endswith(end):
            at = len(bare) - len(end)
        elif end:
            at, _ = first_mark((end,), text, max(0, len(text) - len(end) + 1))
        is_line = self._tags.trims == "line" and text.endswith("\n", 0, at)
        return at - is_line


def _characters(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
