"""JsonCalls: calls whose arguments are written in JSON, read as they are written.

A call is certain once its name is whole and its arguments begin as an object; then what is written
of them is passed on at once. Knows how models write a call's name before JSON; not how other calls
are spelled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from semantic.application.chat.object_text import ObjectText
from semantic.ports.chat import Marks


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of a call's arguments; with a `name` the first part of another call."""

    name: str | None
    arguments: str


_Read = Literal["all", "some", "none"]
"""Whether a text begins with all of what is expected, could still do so, or cannot."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What precedes the arguments of a call: texts, alternatives of texts and one name.

    White space may surround each step. `name` finds the name, in its group 1; `quoted`: it is a
    JSON string. `starts_name` matches what could become a name.
    """

    before: tuple[str, ...]
    name: re.Pattern[str]
    starts_name: re.Pattern[str]
    after: tuple[tuple[str, ...], ...]
    quoted: bool = False


LIST_START: Final = "["
_LONGEST_NAME: Final = 200
_LONGEST_SPACE: Final = 256
"""White space at one place before the arguments, which are read again with each token until they
begin: with more, or a longer name, a call is parsed as a whole."""
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_NAMES: Final = re.compile(r"[A-Za-z_][\w.:/-]{0,127}", re.ASCII)
_HEADS: Final = (
    # {"name": "look", "arguments": {
    _Head(
        ("{", '"name"', ":"),
        re.compile(r'("(?:[^"\\\x00-\x1f]|\\.)*")'),
        re.compile(r'(?:"[^\x00-\x1f]*)?'),
        ((",",), ('"arguments"', '"parameters"'), (":",), ("{",)),
        quoted=True,
    ),
    # look[ARGS]{
    _Head(
        (),
        re.compile(r"([\w-]+)(?![\w-])", re.ASCII),
        re.compile(r"[\w-]*", re.ASCII),
        (("[ARGS]",), ("{",)),
    ),
    # <|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{
    _Head(
        ("<|tool_call_begin|>",),
        re.compile(r"(?:functions\.)?([\w.-]+):[0-9]+(?![0-9])", re.ASCII),
        re.compile(r"[\w.-]*(?::[0-9]*)?", re.ASCII),
        (("<|tool_call_argument_begin|>",), ("{",)),
    ),
)
_OBJECT_HEAD: Final = _HEADS[0]
_BETWEEN: Final = ("}", "]", "<|tool_call_end|>")
"""What ends a call, of which any number may follow its arguments."""


def is_name(name: str) -> bool:
    """Whether `name` may be that of a tool that was not offered. Some formats take all that
    precedes the arguments for the name."""
    return _NAMES.fullmatch(name) is not None


@dataclass(slots=True)
class _Found:
    """A head at the start of a text: as far as it goes, its name, and where the arguments begin."""

    read: _Read
    name: str | None = None
    end: int = 0
    head: _Head = _OBJECT_HEAD


class JsonCalls:
    """The calls in the text after a start mark, which is pushed in any pieces.

    `is_json` is None until it is known whether the first call is one whose arguments are JSON. Once
    it is False nothing more is read. `end` is where the end mark begins, once the last call has
    ended; `more` where something begins, after the first call, that is none of the known forms.
    """

    def __init__(self, marks: Marks, tools: frozenset[str]) -> None:
        self.is_json: bool | None = None
        self.end: int | None = None
        self.more: int | None = None
        self.is_unfinished = False
        self._marks = marks
        self._tools = tools
        self._text = ""
        self._at = 0  # what precedes is read
        self._is_list = False
        self._head: _Head | None = None
        self._object: ObjectText | None = None
        self._starts = 0  # of the arguments
        self._written: list[CallPart] = []
        self._n_released = 0
        self._held = ""
        self._marked: dict[int, None] = {}  # where end marks are within the arguments, in order

    @property
    def rest(self) -> str:
        """What is left from `more` on; the rest of a list is one itself."""
        return (LIST_START if self._is_list else "") + self._text[self.more or 0 :]

    def push(self, text: str) -> list[CallPart]:
        """What is certain with more text."""
        self._text += text
        while self.end is None and self.more is None and self.is_json is not False:
            step = self._find_head if self._object is None else self._read_arguments
            if not step():
                break
        return self._taken()

    def finish(self, *, cut: bool, stopped: bool) -> list[CallPart]:
        """What is left when the answer ends; a call that was `cut`, or that a stop string ended
        (`stopped`), keeps what is certain of it.

        Of a call that was cut before its arguments the name is left, if that is whole.
        """
        read = self._object
        if read is not None:
            self._end_open(read, cut=cut or stopped)
        elif cut and self.end is None and self.is_json is not False:
            found = self._found()
            if found.name is not None and self._is_called(found.name):
                self.is_json = self.is_unfinished = True
                self._written.append(CallPart(found.name, ""))
        return self._taken()

    def _end_open(self, read: ObjectText, *, cut: bool) -> None:
        """End arguments that are open when the answer ends."""
        self.is_unfinished = cut
        if read.is_broken or not cut:
            self._end_at(next(iter(self._marked), len(self._text)))
        else:
            self._release()

    def _taken(self) -> list[CallPart]:
        taken, self._written = self._written, []
        return taken

    # Heads

    def _find_head(self) -> bool:
        """Read what precedes a call's arguments; False if it takes more text."""
        if self.is_json:
            is_found = self._skip_end()
            if is_found is not None:
                return is_found
        found = self._found()
        if found.read == "some":
            return False
        if found.read == "none" or found.name is None or not self._is_called(found.name):
            if self.is_json:
                self.more = self._at
            else:
                self.is_json = False
            return False
        self.is_json = True
        self._head = found.head
        self._at = self._starts = found.end
        self._object, self._n_released = ObjectText(), 0
        self._written.append(CallPart(found.name, ""))
        return True

    def _skip_end(self) -> bool | None:
        """Skip what ends a call; None if another call may begin here."""
        self._at = _behind_space(self._text, self._at)
        rest = self._text[self._at :]
        if not rest:
            return False
        mark = self._marks.end
        if mark and rest.startswith(mark):
            self.end = self._at
            return False
        separators = (*_BETWEEN, *((",",) if self._is_list else ()), *self._repeated())
        for one in separators:
            if rest.startswith(one):
                self._at += len(one)
                return True
        if any(one.startswith(rest) for one in (*separators, mark)):
            return False
        return None

    def _repeated(self) -> tuple[str, ...]:
        """The start mark, where only the answer's end ends the calls."""
        return () if self._marks.end else (self._marks.start,)

    def _found(self) -> _Found:
        """The head at this position."""
        at = self._at
        if self.is_json is None:
            at = _behind_space(self._text, at)
            if at - self._at > _LONGEST_SPACE:
                return _Found("none")
            if self._text.startswith(LIST_START, at):
                self._is_list = True
                at += 1
        heads = _HEADS if self._head is None else (self._head,)
        if self._is_list:
            heads = (_OBJECT_HEAD,)
        founds = [_find(head, self._text, at) for head in heads]
        whole = next((found for found in founds if found.read == "all"), None)
        some = [found for found in founds if found.read == "some"]
        named = next((found for found in some if found.name is not None), None)
        return whole or named or next(iter(some), None) or _Found("none")

    def _is_called(self, name: str) -> bool:
        return name in self._tools or is_name(name)

    # Arguments

    def _read_arguments(self) -> bool:
        """Read more of the arguments; False if it takes more text, or they have ended for good.

        From an end mark within them on nothing is certain before they are closed: a string may
        contain the mark, or the model may have forgotten to close them.
        """
        read = self._object
        if read is None:
            return True
        if read.is_broken:
            return self._end_broken()
        if self._at in self._marked:
            follows = self._text[self._at + len(self._marks.end) :].lstrip()
            if follows.startswith(self._marks.start):
                self._end_at(self._at)
                return False
            if self._marks.start.startswith(follows):
                return False
        limit = self._limit()
        self._held += read.push(self._text[self._at : limit])
        has_read, self._at = limit > self._at, limit
        if not self._marked or read.is_closed:
            self._release()
        if read.is_closed:
            self._at, self._object = self._starts + read.n_taken, None
            self._marked.clear()
            return True
        is_marked = bool(self._marks.end) and self._text.startswith(self._marks.end, limit)
        if is_marked and not read.is_broken:
            self._marked[limit] = None
        return has_read or is_marked or read.is_broken

    def _limit(self) -> int:
        """Where the next end mark begins, or could: up to there the arguments can be read."""
        mark = self._marks.end
        if not mark:
            return len(self._text)
        start = self._at + (self._at in self._marked)
        at = self._text.find(mark, start)
        return len(self._text) - _open_end(self._text, mark, start) if at < 0 else at

    def _end_broken(self) -> bool:
        """End arguments that are no JSON at the first end mark, once it is there."""
        if self._marked:
            self._end_at(next(iter(self._marked)))
        elif self._marks.end:
            at = self._text.find(self._marks.end, self._at)
            if at >= 0:
                self._end_at(at)
            else:
                self._at = max(self._at, len(self._text) - len(self._marks.end) + 1)
        return False

    def _end_at(self, end: int) -> None:
        """End the arguments at `end` though they are no object: they are passed on as written."""
        rest = self._text[self._starts + self._n_released : end].rstrip()
        if self._head is _OBJECT_HEAD and rest.endswith("}"):
            rest = rest[:-1].rstrip()  # the brace of the call itself
        if rest:
            self._written.append(CallPart(None, rest))
        self._object, self._held, self.end = None, "", end

    def _release(self) -> None:
        if self._held:
            self._written.append(CallPart(None, self._held))
            self._held = ""
        if self._object is not None:
            self._n_released = self._object.n_taken


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _open_end(text: str, mark: str, start: int) -> int:
    """Length of the longest end of `text`, from `start` on, that `mark` begins with."""
    longest = min(len(mark) - 1, len(text) - start)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _find(head: _Head, text: str, at: int) -> _Found:
    """`head` at position `at` of `text`."""
    for step in (*head.before, ""):
        read, at = _find_one((step,), text, at)
        if read != "all":
            return _Found(read)
    found = head.name.match(text, at)
    if found is None or found.end() - at > _LONGEST_NAME:
        begins = len(text) - at <= _LONGEST_NAME and head.starts_name.fullmatch(text, at)
        return _Found("some" if begins else "none")
    if not head.quoted and found.end() == len(text):
        return _Found("some")  # more of the name may follow
    name = _name_in(found.group(1), quoted=head.quoted)
    if not name:
        return _Found("none")
    at = found.end()
    for steps in head.after:
        read, at = _find_one(steps, text, at)
        if read != "all":
            return _Found(read, name)
    return _Found("all", name, at - 1, head)


def _find_one(texts: Sequence[str], text: str, at: int) -> tuple[_Read, int]:
    """One of `texts` behind white space, and the position behind it."""
    before, at = at, _behind_space(text, at)
    if at - before > _LONGEST_SPACE:
        return "none", at
    for one in texts:
        if text.startswith(one, at):
            return "all", at + len(one)
    rest = text[at : at + max(map(len, texts))]
    return ("some" if any(one.startswith(rest) for one in texts) else "none"), at


def _name_in(text: str, *, quoted: bool) -> str:
    """The name spelled in `text`; empty if it is none."""
    if not quoted:
        return text
    try:
        name = json.loads(text)
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""
