"""CallText: the calls of an answer, streamed in a known spelling or read whole in JSON.

Knows what may be wrong in what a model generates. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from semantic.application.chat.argument_types import is_deeper_than, portable_json, refuse_constant
from semantic.application.chat.object_text import MAX_DEPTH, ObjectText
from semantic.application.chat.streamed_calls import (
    LIST_START,
    CallPart,
    CallSyntax,
    StreamedCalls,
    find_step,
)
from semantic.domain.chat import is_tool_name, replace_surrogates
from semantic.domain.errors import ToolCallError
from semantic.domain.stop_strings import first_mark

_NAMES: Final = ("name", "tool_name")
_ARGUMENTS: Final = ("arguments", "parameters")
_MAX_RENDERED_DEPTH: Final = 64
"""Levels of lists and objects in a call of the history; templates recurse into each level."""


_MOST_ENDS: Final = 64
"""Limit of end marks: the reader parses the whole text at each."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call parsed from an answer; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ReadCall:
    """The end of the text between two marks: its calls still to emit or a `problem`, and the text
    after it in `rest`.

    `follows`: the text follows an emitted call. `closed`: it has its end mark. `unfinished`: the
    last call lacks its end.
    """

    text: str = ""
    calls: tuple[WrittenCall, ...] = ()
    problem: str | None = None
    rest: str = ""
    follows: bool = False
    closed: bool = True
    unfinished: bool = False


class CallText:
    """The calls of an answer: the text between two marks until it has ended, then the next one."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._certain: list[CallPart] = []
        self._begin()

    def _begin(self) -> None:
        self._streamed = StreamedCalls(self._syntax)
        self._whole: _WholeCalls | None = None

    def push(self, text: str) -> None:
        if self._whole is not None:
            self._whole.push(text)
            return
        calls = self._streamed
        self._certain += calls.push(text)
        if calls.is_known is False or calls.has_object:
            self._whole = _WholeCalls(self._syntax, follows=calls.is_strange)
            self._whole.push(calls.rest)

    def certain(self) -> list[CallPart]:
        """Return the certain part since the last call."""
        certain, self._certain = self._certain, []
        return certain

    def next(self) -> ReadCall | None:
        """Remove and return what ends the text, if the end is there."""
        if self._whole is not None:
            return self._done(self._whole.next())
        calls = self._streamed
        is_over = calls.is_ended or calls.is_strange
        return self._done(ReadCall(rest=calls.rest)) if is_over else None

    def finish(self, *, cut: bool, stopped: bool = False) -> ReadCall | None:
        """Return the text's end at the answer's end; None if there is nothing of a call.

        Text that was `cut` keeps the certain part of its calls; after a stop string (`stopped`) it
        may be unfinished, and keeps the emitted part. Text without an end mark is complete if it
        parses.
        """
        if self._whole is None:
            calls = self._streamed
            self._certain += calls.finish(cut=cut, stopped=stopped)
            if calls.is_known:
                rest = "" if cut and not calls.is_ended else calls.rest
                return self._done(ReadCall(rest=rest, unfinished=calls.is_unfinished))
            self._whole = _WholeCalls(self._syntax, follows=False)
            self._whole.push(calls.rest)
        return self._done(self._whole.finish(cut=cut, stopped=stopped))

    def _done(self, read: ReadCall | None) -> ReadCall | None:
        if read is not None:
            self._begin()
        return read


class _WholeCalls:
    """The text of calls, for parsing at its end.

    The end mark may occur inside the arguments. So text that does not parse continues to the next
    end mark, unless another call follows: then it was complete and is invalid.
    """

    def __init__(self, syntax: CallSyntax, *, follows: bool) -> None:
        """`follows`: the text follows an emitted call."""
        self._syntax = syntax
        self._follows = follows
        self._searched: list[str] = []  # the text in which no further end mark begins
        self._rest = ""
        self._n_ends = 0
        self._wrong: ReadCall | None = None  # the parse up to the last end mark

    def push(self, text: str) -> None:
        self._rest += text

    def next(self) -> ReadCall | None:
        """Return the text's end, if it is there."""
        marks = self._syntax.marks
        while marks.end:
            if self._wrong is None:
                found = self._parse_to_mark(marks.end)
                if found is None or found.problem is None:
                    return found
                self._wrong = found
            follows, _ = find_step((marks.start,), self._rest, 0)
            if follows == "all" or self._n_ends == _MOST_ENDS:
                return replace(self._wrong, rest=self._rest)
            if follows == "some":
                return None
            self._wrong = None
        return None

    def finish(self, *, cut: bool, stopped: bool) -> ReadCall | None:
        if self._wrong is not None:
            return replace(self._wrong, rest=self._rest)
        text = "".join(self._searched) + self._rest
        if cut:
            return ReadCall(text, closed=False, unfinished=True) if self._follows else None
        found = replace(self._parse(text), closed=False)
        return None if stopped and found.problem is not None else found

    def _parse_to_mark(self, end: str) -> ReadCall | None:
        """Parse the text up to the next end mark, if that is there."""
        at, mark = first_mark((end,), self._rest)
        self._searched.append(self._rest[:at])
        self._rest = self._rest[at:]
        if mark is None:
            return None
        self._rest = self._rest.removeprefix(end)
        self._n_ends += 1
        found = self._parse("".join(self._searched))
        self._searched.append(end)
        return replace(found, rest=self._rest)

    def _parse(self, text: str) -> ReadCall:
        try:
            return ReadCall(text, tuple(read_calls(text, self._syntax.tools)))
        except ToolCallError as error:
            shown = text.removeprefix(LIST_START) if self._follows else text
            return ReadCall(shown, problem=str(error), follows=self._follows)


def read_calls(text: str, names: Collection[str]) -> list[WrittenCall]:
    """Return the call, or list of calls, that `text` is in JSON.

    A call may name a tool outside `names`, and have other arguments than an object: the client
    answers it, and the model corrects itself. Raises ToolCallError if there is no call.
    """
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ToolCallError(f"cannot read the model's tool call: {reason}") from error
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise ToolCallError("the model marked a tool call and wrote none")
    return [_checked_call(call, names) for call in calls]


def parse_arguments(arguments: str) -> object:
    """The arguments of a call in the history as an object; null and blank text are an empty one.

    Returns the text itself if it is not the JSON of an object, or nested too deeply to render.
    """
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if value is None:
        return {}
    if not isinstance(value, dict) or is_deeper_than(_MAX_RENDERED_DEPTH, value):
        return arguments
    return value


def object_of(arguments: str) -> dict[str, object]:
    """Return an object in place of other arguments: as far as cut ones go, else one with the text
    as its only field."""
    read = ObjectText()
    certain = read.push(arguments)
    if certain and not read.is_broken and not read.is_closed:
        found = json.loads(certain + read.closing())
        if isinstance(found, dict):
            return found
    return {"raw_arguments": arguments}


def _checked_call(call: object, names: Collection[str]) -> WrittenCall:
    fields = call if isinstance(call, Mapping) else {}
    name = next((fields[one] for one in _NAMES if one in fields), None)
    if not isinstance(name, str):
        raise ToolCallError("a tool call of the model must be a JSON object with a name")
    if name not in names and not is_tool_name(name):
        raise ToolCallError("the model wrote a tool call without the name of a tool")
    arguments: object = next((fields[one] for one in _ARGUMENTS if one in fields), {})
    if isinstance(arguments, str):
        found = parse_arguments(arguments)
        if isinstance(found, str):
            return WrittenCall(name, replace_surrogates(found))
        arguments = found
    if is_deeper_than(MAX_DEPTH, arguments):
        raise ToolCallError(f"the arguments of {name} must have at most {MAX_DEPTH} levels")
    try:
        return WrittenCall(name, portable_json(arguments))
    except ValueError as error:
        raise ToolCallError(f"the arguments of {name} have a number that JSON lacks") from error
