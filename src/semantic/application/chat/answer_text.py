"""Splits a growing answer at marks, and reads the tool calls in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from semantic.application.chat.json_calls import WrittenCall, read_calls
from semantic.application.chat.streamed_calls import (
    LIST_START,
    CallPart,
    CallSyntax,
    StreamedCalls,
    find_step,
)
from semantic.domain.errors import ToolCallError
from semantic.domain.stop_strings import first_mark
from semantic.domain.value_objects import TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenText:
    """Text with log-probabilities, and the offset of each token."""

    text: str = ""
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()

    @classmethod
    def of(cls, text: str, logprobs: Sequence[TokenLogprob] = ()) -> TokenText:
        """Return the text of one token, with `logprobs` at its beginning."""
        return cls(text, tuple((0, logprob) for logprob in logprobs))

    def __bool__(self) -> bool:
        return bool(self.text or self.logprobs)

    def __add__(self, other: TokenText) -> TokenText:
        moved = tuple((at + len(self.text), logprob) for at, logprob in other.logprobs)
        return TokenText(self.text + other.text, self.logprobs + moved)

    def split(self, at: int) -> tuple[TokenText, TokenText]:
        """Split the text before character `at`. A token belongs to the half in which it begins."""
        before = tuple(entry for entry in self.logprobs if entry[0] < at)
        rest = tuple((start - at, value) for start, value in self.logprobs if start >= at)
        return TokenText(self.text[:at], before), TokenText(self.text[at:], rest)

    @property
    def values(self) -> tuple[TokenLogprob, ...]:
        return tuple(logprob for _, logprob in self.logprobs)


_LINE: Final = 64
_FENCE: Final = "```"


class MarkFinder:
    """Cuts a stream of text at marks, and holds back text that may become a mark."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(marks)
        self._held = TokenText()
        self.mark = TokenText()  # the last one
        self._is_whole = False
        self.begin()

    def begin(self, *, fenced: bool = False) -> None:
        """Begin a part of the answer; `fenced` says that the part begins inside code."""
        self.line = self._start = ""
        self._n_quotes = 0
        self._fenced = fenced

    @property
    def is_fenced(self) -> bool:
        return self._fenced or self._start == _FENCE

    @property
    def held(self) -> str:
        return self._held.text

    def push(self, text: TokenText) -> None:
        self._held += text

    def end(self) -> None:
        """Record that the text is complete."""
        self._is_whole = True

    def look_for(self, marks: Sequence[str]) -> None:
        """Cut the following text at `marks`."""
        self._marks = tuple(marks)

    @property
    def is_at_text(self) -> bool:
        """Return whether the next text, apart from white space, cannot be a mark."""
        text = self._held.text.lstrip()
        return bool(text) and not any(
            text.startswith(mark) or mark.startswith(text) for mark in self._marks
        )

    def take(self) -> tuple[TokenText, str | None]:
        """Return the text before the next mark, and the mark. If no mark has arrived, the mark is
        None, and the text cannot become one."""
        text = self._held.text
        at, mark = first_mark(self._marks, text)
        while mark is not None and self._opens_quote(text[:at]):
            end = at + len(mark)
            if end == len(text) and not self._is_whole:
                mark = None  # depends on the next character
            elif text[end : end + 1] == "`":
                at, mark = first_mark(self._marks, text, end)
            else:
                break
        before = self._take(at)
        if mark is not None:
            self.mark = self._take(len(mark))
        return before, mark

    def put_back(self) -> None:
        """Put the last mark back, as text."""
        self._held = self.mark + self._held
        self.line = self.line.removesuffix(self.mark.text)

    def take_all(self) -> TokenText:
        return self._take(len(self._held.text))

    def _opens_quote(self, before: str) -> bool:
        _, ends_line, line = before.rpartition("\n")
        last = line[-1:] or ("" if ends_line else self.line[-1:])
        n_quotes = line.count("`") + (0 if ends_line else self._n_quotes)
        return last == "`" and n_quotes % 2 == 1

    def _take(self, size: int) -> TokenText:
        if size == len(self._held.text):
            taken, self._held = self._held, TokenText()
        else:
            taken, self._held = self._held.split(size)
        for number, piece in enumerate(taken.text.split("\n")):
            if number:
                self.begin(fenced=self._fenced != (self._start == _FENCE))
            self._start = f"{self._start}{piece}".lstrip()[:3]
            self.line = f"{self.line}{piece}"[-_LINE:]
            self._n_quotes += piece.count("`")
        return taken


class Trimmer:
    """Drops white space next to marks, and restores it if text follows: "one <mark> two" becomes
    "one two"."""

    def __init__(self, *, after_mark: bool) -> None:
        self._after_mark = after_mark
        self._space = TokenText()  # white space held back
        self._bare = TokenText()  # tokens without text, after a mark
        self._emitted = False

    @property
    def has_emitted(self) -> bool:
        return self._emitted

    def push(self, text: TokenText) -> TokenText:
        """Add `text`. Returns the text that is now final."""
        if self._after_mark:
            text = self._bare + text
            blank = len(text.text) - len(text.text.lstrip())
            text = text.split(blank)[1]
            if not text.text:
                self._bare = text
                return TokenText()
            self._after_mark = False
        whole = self._space + text
        emitted, self._space = whole.split(len(whole.text.rstrip()))
        if not self._space.text:
            emitted, self._space = emitted + self._space, TokenText()
        self._emitted = self._emitted or bool(emitted.text)
        return emitted

    def mark(self) -> None:
        self._after_mark, self._bare = True, TokenText()
        if not self._emitted:
            self._space = TokenText()

    def flush(self) -> TokenText:
        """Return the remaining text when the answer ends."""
        return TokenText() if self._after_mark else self._space


_MOST_ENDS: Final = 64
"""The maximum number of end marks to try, since each try parses the whole text."""


@dataclass(frozen=True, slots=True)
class ReadCall:
    """The tool calls between two marks, or the `problem` with these calls."""

    text: str = ""
    calls: tuple[WrittenCall, ...] = ()
    problem: str | None = None
    rest: str = ""
    follows: bool = False
    closed: bool = True
    unfinished: bool = False


class CallText:
    """Reads the tool calls of an answer."""

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
        """Return the parts of tool calls that are new and final."""
        certain, self._certain = self._certain, []
        return certain

    def next(self) -> ReadCall | None:
        """Return the result if the tool calls have ended, else None."""
        if self._whole is not None:
            return self._done(self._whole.next())
        calls = self._streamed
        is_over = calls.is_ended or calls.is_strange
        return self._done(ReadCall(rest=calls.rest)) if is_over else None

    def finish(self, *, cut: bool, stopped: bool = False) -> ReadCall | None:
        """Return the result at the answer's end; None outside tool calls. In a `cut` answer, tool
        calls keep their finished parts."""
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
    # Arguments may contain the end mark, so malformed text continues to the next one.

    def __init__(self, syntax: CallSyntax, *, follows: bool) -> None:
        self._syntax = syntax
        self._follows = follows
        self._searched: list[str] = []  # the text in which no further end mark begins
        self._rest = ""
        self._n_ends = 0
        self._wrong: ReadCall | None = None  # the parse up to the last end mark

    def push(self, text: str) -> None:
        self._rest += text

    def next(self) -> ReadCall | None:
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
