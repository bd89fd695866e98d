"""StreamedCalls: reads tool calls in a known spelling while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from semantic.application.chat.argument_types import ArgumentTypes
from semantic.application.chat.object_text import ObjectText
from semantic.application.chat.spelled_arguments import ListedArguments, SpelledArguments
from semantic.application.chat.tagged_arguments import TaggedArguments
from semantic.domain.chat import Tool, is_tool_name
from semantic.domain.stop_strings import first_mark
from semantic.ports.chat import CallHead, CallList, CallSpelling, Marks

Read = Literal["all", "some", "none"]
"""How much of an expected text has arrived."""

LONGEST_SPACE: Final = 256
"""The maximum length of white space before a call's arguments, since every token reads it again."""
_LONGEST_NAME: Final = 200
_SPACE: Final = re.compile(r"[ \t\n\r]*")

OBJECT_HEAD: Final = CallHead(
    # {"name": "look", "arguments": {
    ("{", '"name"', ":"),
    re.compile(r'(?P<name>"(?:[^"\\\x00-\x1f]|\\.)*")'),
    re.compile(r'(?:"[^\x00-\x1f]*)?'),
    ((",",), ('"arguments"', '"parameters"'), (":",)),
    ("{",),
    quoted=True,
)


TYPED_HEAD: Final = replace(
    OBJECT_HEAD, before=("{", '"type"', ":", '"function"', ",", '"name"', ":")
)
_MEMBER: Final = re.compile(r',\s*"(?:[^"\\]|\\.)*"\s*:\s*')
_BEGINS_MEMBER: Final = re.compile(r',\s*(?:"(?:[^"\\]|\\.)*(?:"\s*:?\s*)?)?')
_LONGEST_MEMBER: Final = 4096
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class FoundHead:
    """The start of a tool call, which may be incomplete. The arguments begin at `end`."""

    read: Read
    head: CallHead = OBJECT_HEAD
    name: str | None = None
    end: int = 0


def find_head(heads: Iterable[CallHead], text: str, at: int) -> FoundHead:
    """Return the start of a call at position `at`, or else the longest incomplete start."""
    founds = [_find(head, text, at) for head in heads]
    whole = next((found for found in founds if found.read == "all"), None)
    some = [found for found in founds if found.read == "some"]
    named = next((found for found in some if found.name is not None), None)
    return whole or named or next(iter(some), None) or FoundHead("none")


def find_step(steps: tuple[str, ...], text: str, at: int) -> tuple[Read, int]:
    """Look for one of `steps` after white space; return how much of it has arrived, and its end."""
    begins, at = at, behind_space(text, at)
    if at - begins > LONGEST_SPACE:
        return "none", at
    for step in steps:
        if text.startswith(step, at):
            return "all", at + len(step)
    rest = text[at : at + max(map(len, steps))]
    return ("some" if any(step.startswith(rest) for step in steps) else "none"), at


def behind_space(text: str, at: int) -> int:
    """Return the position after any white space."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _find(head: CallHead, text: str, at: int) -> FoundHead:
    for step in (*head.before, ""):
        read, at = find_step((step,), text, at)
        if read != "all":
            return FoundHead(read)
    found = head.name.match(text, at)
    if found is None or found.end() - at > _LONGEST_NAME:
        begins = len(text) - at <= _LONGEST_NAME and head.starts_name.fullmatch(text, at)
        return FoundHead("some" if begins else "none")
    if not head.quoted and found.end() == len(text):
        return FoundHead("some")  # more of the name may follow
    name = _name_in(found["name"], quoted=head.quoted)
    if not name:
        return FoundHead("none")
    at = found.end()
    read, at = _behind_name(head, text, at)
    return FoundHead(read, head, name, at)


def _behind_name(head: CallHead, text: str, at: int) -> tuple[Read, int]:
    for steps in head.after:
        read, at = find_step(steps, text, at)
        if read != "all":
            return read, 0
    if not head.begin:
        return "all", at
    read, end = find_step(head.begin, text, at)
    if read != "all":
        return read, 0
    return read, end - next(len(one) for one in head.begin if text.endswith(one, at, end))


def _name_in(text: str, *, quoted: bool) -> str | None:
    if not quoted:
        return text
    try:
        name = json.loads(text)
    except ValueError:
        return None
    return name if isinstance(name, str) else None


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call's arguments. A `name` begins a new call."""

    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The form of calls in an answer."""

    marks: Marks
    tools: Mapping[str, Tool]
    spelling: CallSpelling | None

    @property
    def ends(self) -> tuple[str, ...]:
        """The end marks of the calls; empty if the calls have none."""
        own = () if self.spelling is None else self.spelling.ends
        return (self.marks.end, *own) if self.marks.end else own

    def heads(self, *, in_list: bool) -> tuple[CallHead, ...]:
        """Return the possible starts of a call. `in_list` says that the call is inside a list."""
        spelling = self.spelling
        if spelling is None or spelling.in_list != in_list:
            return (OBJECT_HEAD, TYPED_HEAD)
        own = (spelling.json_head, spelling.head)
        return (OBJECT_HEAD, TYPED_HEAD, *(head for head in own if head is not None))

    def arguments(self, name: str) -> SpelledArguments | None:
        """Return a reader for the arguments of a call of `name`; None for JSON."""
        form = None if self.spelling is None else self.spelling.arguments
        if isinstance(form, CallList):
            return ListedArguments(form)
        if form is None:
            return None
        parameters = self.tools[name].parameters if name in self.tools else {}
        types = ArgumentTypes(parameters, untyped_is_text=form.untyped_is_text)
        return TaggedArguments(form, types)

    def is_called(self, name: str) -> bool:
        """Return whether `name` may be a tool's name."""
        return name in self.tools or is_tool_name(name)


LIST_START: Final = "["
_Arguments = ObjectText | SpelledArguments
_BETWEEN: Final = ("}", "]")
"""The brackets that end a call in JSON."""


class StreamedCalls:
    """Reads the tool calls after a start mark as their text arrives. `is_known` says whether the
    reader can stream the calls; None while undecided."""

    def __init__(self, syntax: CallSyntax) -> None:
        self.is_known: bool | None = None
        self.is_ended = False
        self.is_strange = False
        self.is_unfinished = False
        self._syntax = syntax
        self._end_marks = syntax.ends
        self._text = ""  # not read yet, from `_at` on
        self._at = 0
        self._is_list = False
        self._head: CallHead | None = None
        self._written: list[CallPart] = []
        # The open arguments:
        self._arguments: _Arguments | None = None
        self._n_pushed = 0
        self._held = ""  # certain unless an end mark is part of it
        self._source: list[str] = []  # read, but not released
        self._n_source = 0
        self._first_mark: int | None = None  # where the first end mark within them is in `_source`
        self._ending = ""  # the JSON that would end them there
        self._is_at_mark = False
        self._n_ended = 0

    @property
    def rest(self) -> str:
        """The unread text."""
        start = LIST_START if self.has_object and self._is_list else ""
        return start + self._text[self._at :]

    @property
    def has_object(self) -> bool:
        """True if the unknown text is an object, which may be a call."""
        return self.is_strange and self._text.startswith("{", behind_space(self._text, self._at))

    def push(self, text: str) -> list[CallPart]:
        """Add `text`. Returns the parts of tool calls that are now final."""
        self._text += text
        while not self.is_ended and not self.is_strange and self.is_known is not False:
            step = self._find_call if self._arguments is None else self._read_arguments
            if not step():
                break
        self._text, self._at = self._text[self._at :], 0
        return self._taken()

    def finish(self, *, cut: bool, stopped: bool) -> list[CallPart]:
        """Return the last parts of tool calls when the answer ends. An unfinished call keeps the
        part that is final."""
        if self._arguments is not None:
            self._end_open(self._arguments, cut=cut, stopped=stopped)
        elif cut and not self.is_ended and self.is_known is not False:
            found = self._found()
            if found.name is not None and self._syntax.is_called(found.name):
                self.is_known = self.is_unfinished = True
                self._written.append(CallPart(found.name, ""))
        return self._taken()

    def _taken(self) -> list[CallPart]:
        taken, self._written = self._written, []
        return taken

    # The beginning of a call

    def _find_call(self) -> bool:
        """Read up to a call's arguments. Returns False if more text has to arrive."""
        if self.is_known:
            is_found = self._skip_end()
            if is_found is not None:
                return is_found
        found = self._found()
        if found.read == "some":
            return False
        name = found.name
        if found.read == "all" and name is not None and self._syntax.is_called(name):
            self._begin(found, name)
            return True
        self.is_strange = self.is_known is True
        self.is_known = self.is_strange
        return False

    def _begin(self, found: FoundHead, name: str) -> None:
        self._at = found.end
        self.is_known = True
        self._head = found.head
        spelling = self._syntax.spelling
        is_spelled = spelling is not None and found.head is spelling.head
        own = self._syntax.arguments(name) if is_spelled else None
        self._arguments = own or ObjectText()
        self._n_pushed = self._n_ended = 0
        self._written.append(CallPart(name, ""))

    def _skip_end(self) -> bool | None:
        """Skip a call's end. Returns False if more text has to arrive, and None if a call may
        begin."""
        self._at = behind_space(self._text, self._at)
        rest = self._text[self._at :]
        if not rest:
            return False
        member = self._skip_member() if self._head is not None and self._head.quoted else None
        if member is not None:
            return member
        if rest.startswith(self._end_marks):
            self._end(rest)
            return False
        spelling = self._syntax.spelling
        own = () if spelling is None else spelling.between
        separators = (*_BETWEEN, *own, *((",",) if self._is_list else ()), *self._repeated())
        for one in separators:
            if rest.startswith(one):
                self._at += len(one)
                return True
        if any(one.startswith(rest) for one in (*separators, *self._end_marks)):
            return False
        return None

    def _skip_member(self) -> bool | None:
        """Skip a member after the arguments. Returns False if more text has to arrive, and None
        without a member."""
        more = False if len(self._text) - self._at < _LONGEST_MEMBER else None
        found = _MEMBER.match(self._text, self._at)
        if found is None:
            return more if _BEGINS_MEMBER.fullmatch(self._text, self._at) else None
        try:
            _, end = _DECODER.raw_decode(self._text, found.end())
        except (ValueError, RecursionError):
            return more
        if end == len(self._text):
            return more  # a number may go on
        self._at = end
        return True

    def _repeated(self) -> tuple[str, ...]:
        start = self._syntax.marks.start
        return (start,) if start and not self._end_marks else ()

    def _found(self) -> FoundHead:
        at = self._at
        if self.is_known is None:
            at = behind_space(self._text, at)
            if at - self._at > LONGEST_SPACE:
                return FoundHead("none")
            if self._text.startswith(LIST_START, at):
                self._is_list = True
                at += 1
        heads = self._syntax.heads(in_list=self._is_list)
        return find_head(heads if self._head is None else (self._head,), self._text, at)

    # Arguments

    def _read_arguments(self) -> bool:
        """Read more of the arguments. Returns False if more text has to arrive."""
        read = self._arguments
        if read is None:
            return True
        if read.is_broken:
            return self._end_broken()
        if self._is_at_mark and not self._is_within():
            return False
        at, mark = first_mark(self._end_marks, self._text, self._at + self._is_at_mark)
        self._push(read, at)
        if read.is_closed:
            self._at -= self._n_pushed - read.n_taken
            self._close()
            return True
        self._is_at_mark = mark is not None
        if self._is_at_mark and isinstance(read, SpelledArguments) and read.is_between:
            self._end_between(read)
        elif self._is_at_mark and self._first_mark is None:
            self._first_mark = self._n_source
            self._ending = self._ending_of(read, at_mark=True)
        return self._is_at_mark or read.is_broken

    def _is_within(self) -> bool:
        mark = next(one for one in self._end_marks if self._text.startswith(one, self._at))
        behind = self._at + len(mark)
        follows, _ = find_step((self._syntax.marks.start,), self._text, behind)
        if follows == "all":
            self._end_arguments(self._n_source)
        return follows == "none"

    def _push(self, read: _Arguments, end: int) -> None:
        text, self._at = self._text[self._at : end], end
        self._keep(text)
        self._n_pushed += len(text)
        self._held += read.push(text)
        if isinstance(read, SpelledArguments) and read.n_ended > self._n_ended:
            self._n_ended, self._first_mark = read.n_ended, None
        if self._first_mark is None or read.is_closed:
            self._release()

    def _end_broken(self) -> bool:
        at, mark = first_mark(self._end_marks, self._text, self._at)
        if self._first_mark is not None:
            self._end_arguments(self._first_mark)
        else:
            self._keep(self._text[self._at : at])
            self._at = at
            if mark is not None:
                self._end_arguments(self._n_source)
        return False

    def _end_open(self, read: _Arguments, *, cut: bool, stopped: bool) -> None:
        if isinstance(read, SpelledArguments) and read.may_end(cut=cut, stopped=stopped):
            self._end_between(read)
            return
        self.is_unfinished = cut or stopped
        if read.is_broken or not self.is_unfinished:
            self._keep(self._text[self._at :])
            self._at = len(self._text)
            if self._first_mark is None:
                self._ending = self._ending_of(read, at_mark=False)
                self._first_mark = self._n_source
            self._end_arguments(self._first_mark)
        else:
            self._release()

    @staticmethod
    def _ending_of(read: _Arguments, *, at_mark: bool) -> str:
        return read.ending(at_mark=at_mark) if isinstance(read, SpelledArguments) else ""

    def _end_between(self, read: SpelledArguments) -> None:
        self._held += read.close()
        self._release()
        self._close()
        self._end(self._text[self._at :])

    def _end_arguments(self, n_source: int) -> None:
        if n_source == self._first_mark and self._ending:
            self._written.append(CallPart(None, self._ending))
        source = "".join(self._source)
        rest = source[:n_source].rstrip()
        if self._head in (OBJECT_HEAD, TYPED_HEAD) and rest.endswith("}"):
            rest = rest[:-1].rstrip()  # the brace of the call itself
        if rest and isinstance(self._arguments, ObjectText):
            self._written.append(CallPart(None, rest))
        self._close()
        self._end(source[n_source:] + self._text[self._at :])

    def _end(self, rest: str) -> None:
        self.is_ended = True
        mark = next((mark for mark in self._end_marks if rest.startswith(mark)), "")
        self._text, self._at = rest.removeprefix(mark), 0

    def _close(self) -> None:
        self._arguments, self._held = None, ""
        self._source, self._n_source = [], 0
        self._first_mark, self._ending, self._is_at_mark = None, "", False

    def _keep(self, text: str) -> None:
        self._source.append(text)
        self._n_source += len(text)

    def _release(self) -> None:
        if self._held:
            self._written.append(CallPart(None, self._held))
            self._held = ""
        read, n_left = self._arguments, 0
        if isinstance(read, ObjectText):
            n_left = self._n_pushed - read.n_taken
        if n_left < self._n_source:
            self._source = ["".join(self._source)[self._n_source - n_left :]] if n_left else []
            self._n_source = n_left
