"""CallText: the text of a tool call, read as it is written where that is possible.

Knows the marks around a call. Calls in a known spelling are read as they are written; the text of
others is parsed once it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from semantic.application.chat.answer_text import first_mark
from semantic.application.chat.call_heads import find_step
from semantic.application.chat.streamed_calls import LIST_START, CallPart, CallSyntax, StreamedCalls
from semantic.domain.errors import ToolCallError
from semantic.ports.chat import WrittenCall

_MOST_ENDS: Final = 64
"""End marks up to which a text is parsed: it is parsed as a whole each time."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """The end of the text between two marks: its calls that are not passed on yet or a `problem`,
    and the text after it in `rest`.

    `follows`: the text follows a call that has been passed on. `closed`: the end mark was there.
    `unfinished`: the last call was cut.
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
        if calls.is_known is False or calls.is_strange:
            self._whole = _WholeCalls(self._syntax, follows=calls.is_strange)
            self._whole.push(calls.rest)

    def certain(self) -> list[CallPart]:
        """What is certain and has not been returned yet."""
        certain, self._certain = self._certain, []
        return certain

    def next(self) -> ReadCall | None:
        """Remove and return what ends the text, if the end is there."""
        if self._whole is not None:
            return self._done(self._whole.next())
        calls = self._streamed
        return self._done(ReadCall(rest=calls.rest)) if calls.is_ended else None

    def finish(self, *, cut: bool, stopped: bool = False) -> ReadCall | None:
        """The text's end at the answer's end; None if there is nothing of a call.

        Text that was `cut` keeps what is certain of its calls; that which a stop string ended
        (`stopped`) may be unfinished, and keeps what has been passed on. Text without an end mark
        is complete if it can be parsed.
        """
        if self._whole is None:
            calls = self._streamed
            self._certain += calls.finish(cut=cut, stopped=stopped)
            if calls.is_known:
                rest = calls.rest if calls.is_ended else ""
                return self._done(ReadCall(rest=rest, unfinished=calls.is_unfinished))
            self._whole = _WholeCalls(self._syntax, follows=False)
            self._whole.push(calls.rest)
        return self._done(self._whole.finish(cut=cut, stopped=stopped))

    def _done(self, read: ReadCall | None) -> ReadCall | None:
        if read is not None:
            self._begin()
        return read


class _WholeCalls:
    """The text of calls, which is parsed when it is complete.

    The end mark may occur inside the arguments. So text that cannot be parsed continues to the
    next end mark, unless another call follows: then it was complete and is invalid.
    """

    def __init__(self, syntax: CallSyntax, *, follows: bool) -> None:
        """`follows`: the text follows a call that has been passed on."""
        self._syntax = syntax
        self._follows = follows
        self._searched: list[str] = []  # the text in which no further end mark begins
        self._rest = ""
        self._n_ends = 0
        self._wrong: ReadCall | None = None  # the parse up to the last end mark

    def push(self, text: str) -> None:
        self._rest += text

    def next(self) -> ReadCall | None:
        """What ends the text, if the end is there."""
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
        """See `CallText.finish`."""
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
            return ReadCall(text, tuple(self._syntax.read(text)))
        except ToolCallError as error:
            is_call = text.startswith(LIST_START)
            if self._follows and not is_call:
                return ReadCall(text)  # such as more members behind the arguments
            shown = text.removeprefix(LIST_START) if self._follows else text
            return ReadCall(shown, problem=str(error), follows=self._follows)
