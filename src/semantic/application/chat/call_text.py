"""CallText: collects the text of a tool call, and passes on what is certain of it.

Knows the marks around a call. Calls in JSON are read as they are written; the text of others is
parsed by a given function once it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from semantic.application.chat.json_calls import LIST_START, CallPart, JsonCalls
from semantic.domain.errors import ToolCallError
from semantic.ports.chat import Marks, WrittenCall


@dataclass(frozen=True, slots=True)
class CallReaders:
    """A chat format's readers of the text between marks: of `whole` calls, and of those that the
    answer's end `cut`. See `ChatFormat`."""

    whole: Callable[[str], list[WrittenCall]]
    cut: Callable[[str], list[WrittenCall]]


@dataclass(frozen=True, slots=True)
class ReadCall:
    """The end of the text between two marks: its calls that are not passed on yet or a `problem`,
    and the text after it in `rest`.

    `follows`: the text follows a call that has been passed on. `closed`: the end mark was there.
    `unfinished`: the last call was cut.
    """

    text: str
    calls: tuple[WrittenCall, ...] = ()
    problem: str | None = None
    rest: str = ""
    follows: bool = False
    closed: bool = True
    unfinished: bool = False


class CallText:
    """Collects the text between two marks until it has ended.

    The end mark may occur inside the arguments. So text that cannot be parsed continues to the
    next end mark, unless another call follows: then it was complete and is invalid.
    """

    def __init__(self, marks: Marks, tools: frozenset[str], readers: CallReaders) -> None:
        """`tools` are the names of those that are offered."""
        self._marks = marks
        self._tools = tools
        self._readers = readers
        self._certain: list[CallPart] = []
        self._begin()

    def _begin(self) -> None:
        self._text = ""
        self._searched = 0  # no end mark begins before this position
        self._wrong: ReadCall | None = None  # the parse up to the last end mark
        self._json: JsonCalls | None = JsonCalls(self._marks, self._tools)
        self._has_begun = False  # `_text` follows a call that has been passed on

    def push(self, text: str) -> None:
        self._text += text
        if self._json is not None:
            self._certain += self._json.push(text)
            self._follow(self._json)

    def certain(self) -> list[CallPart]:
        """What is certain and has not been returned yet, of calls in JSON."""
        certain, self._certain = self._certain, []
        return certain

    def next(self) -> ReadCall | None:
        """Remove and return what ends the text, if the end is there."""
        if self._json is not None:
            end = self._json.end
            return None if end is None else self._ended(end)
        return self._next_whole()

    def finish(self, *, cut: bool, stopped: bool = False) -> ReadCall | None:
        """The text's end at the answer's end; None if there is nothing of a call.

        Text that was `cut` keeps what is certain of its calls; that which a stop string ended
        (`stopped`) may be unfinished, and keeps what has been passed on. Text without an end mark
        is complete if it can be parsed.
        """
        if self._json is not None:
            calls = self._json
            self._certain += calls.finish(cut=cut, stopped=stopped)
            if calls.is_json:
                ended = self._ended(len(self._text) if calls.end is None else calls.end)
                return replace(ended, unfinished=calls.is_unfinished)
        if self._wrong is not None:
            return self._done(self._wrong)
        if cut:
            return self._cut()
        found = self._done(replace(self._reading(self._text, ""), closed=False))
        return None if stopped and found.problem is not None else found

    # Calls in JSON

    def _follow(self, calls: JsonCalls) -> None:
        """Parse as a whole what is not, or no longer, a call in a known form of JSON."""
        if calls.is_json is False:
            self._json = None
        elif calls.more is not None:
            self._json = None
            self._text = calls.rest
            self._has_begun = True

    def _ended(self, end: int) -> ReadCall:
        read = ReadCall(self._text[:end], rest=self._text[end + len(self._marks.end) :])
        self._begin()
        return read

    # Other calls

    def _next_whole(self) -> ReadCall | None:
        """Remove and return the calls if they are complete."""
        end = self._marks.end
        while end:
            if self._wrong is None:
                at = self._text.find(end, self._searched)
                if at < 0:
                    self._searched = max(self._searched, len(self._text) - len(end) + 1)
                    return None
                self._searched = at + len(end)
                found = self._reading(self._text[:at], self._text[self._searched :])
                if found.problem is None:
                    return self._done(found)
                self._wrong = found
            follows = self._text[self._searched :].lstrip()
            if follows.startswith(self._marks.start):
                return self._done(self._wrong)
            if self._marks.start.startswith(follows):
                return None
            self._wrong = None
        return None

    def _cut(self) -> ReadCall | None:
        """What is known of calls that the answer's end cut."""
        calls = tuple(self._readers.cut(self._text))
        read = ReadCall(self._text, calls, closed=False, unfinished=True)
        return self._done(read) if calls or self._has_begun else None

    def _reading(self, text: str, rest: str) -> ReadCall:
        try:
            return ReadCall(text, tuple(self._readers.whole(text)), rest=rest)
        except ToolCallError as error:
            if self._has_begun and not _is_call(text):
                return ReadCall(text, rest=rest)  # such as more members behind the arguments
            shown = text.removeprefix(LIST_START) if self._has_begun else text
            return ReadCall(shown, problem=str(error), follows=self._has_begun)

    def _done(self, found: ReadCall) -> ReadCall:
        if found is self._wrong:
            found = replace(found, rest=self._text[self._searched :])
        self._begin()
        return found


def _is_call(text: str) -> bool:
    """Whether `text`, which follows a call, looks like another one."""
    return text.startswith(LIST_START)
