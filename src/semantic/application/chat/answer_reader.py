"""AnswerReader: separates a generated answer into text, reasoning and tool calls as it streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from semantic.application.chat.answer_text import CallText, MarkFinder, ReadCall, TokenText, Trimmer
from semantic.application.chat.streamed_calls import (
    LIST_START,
    CallPart,
    CallSyntax,
    behind_space,
    find_head,
)
from semantic.domain.answer import (
    AnswerPiece,
    AnswerReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
)
from semantic.domain.chat import Chat, Message, ToolCall
from semantic.domain.stop_strings import MENTIONS
from semantic.domain.value_objects import CompletedGeneration, TokenEvent, TokenLogprob
from semantic.ports.chat import ChatFormat, Marks

_Part = Literal["start", "header", "text", "thought", "call"]
"""A place in an answer: its start, a message's header, or a part of the answer."""

_BETWEEN_TEXTS: Final = TokenText("\n\n")
_LONGEST_HEADER: Final = 512
_PROSE: Final = re.compile(r"[a-z,.;:!?]+(?: [A-Za-z,.;:!?]+){2} ")
"""Three words in a row, which never occur in a header."""

_MOST_OPEN: Final = 8
"""The maximum number of unfinished calls to look for at the answer's end."""


class AnswerReader:
    """Splits the text of one answer into `AnswerPiece`s as the text arrives.

    Marks are never part of a piece. An unparsable call becomes text with its marks. A call inside
    reasoning ends the reasoning, since some models forget the end mark of reasoning.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        chat: Chat,
        *,
        opens_thought: bool,
        closes_thought: bool = False,
        new_id: Callable[[], str],
    ) -> None:
        """The prompt ends inside reasoning if `opens_thought`, and after reasoning if
        `closes_thought`. `new_id` generates ids for tool calls."""
        self._many = chat.parallel_tool_calls
        self._headers = chat_format.headers
        self._may_call = chat.may_call
        self._marks = chat_format.call_marks
        self._new_id = new_id
        spelling = chat_format.call_spelling
        self._unmarked = "" if spelling is None else spelling.unmarked
        self._opens = _marks(chat_format, chat, self._unmarked)
        self._trims = bool(self._opens)
        self._is_formatted = chat.answer_format is not None
        self._found = MarkFinder(tuple(self._opens))
        self._syntax = _syntax(chat_format, chat)
        self._call = CallText(self._syntax)
        self._part: _Part = "thought" if opens_thought else "text"
        self._header = TokenText()
        self._follows_text = False
        self._has_thought = closes_thought
        self._is_fenced = False  # whether the call began within code
        self._given = ""  # the part of a call's text that came from its header
        self._mention = TokenText()  # text that is not a header after all
        if self._headers is not None:
            self._begin_header("")
        elif chat_format.bare_calls and chat.may_call and not opens_thought:
            self._part = "start"
        elif self._is_formatted and not opens_thought:
            self._expect("call" if closes_thought else "thought", "call")
        self._text_trimmer = Trimmer(after_mark=opens_thought or closes_thought)
        self._thought_trimmer = Trimmer(after_mark=True)
        self._opening = self._marks.start  # of the open call
        self._calls = 0
        self._is_unfinished = False
        self._done = False
        self._reasoning_tokens = 0

    @property
    def done(self) -> bool:
        """True if the answer is complete, although the model may continue."""
        return self._done

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens of reasoning so far, including marks."""
        return self._reasoning_tokens

    def push(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[AnswerPiece]:
        """Add the text of one token, which may be empty. Returns the answer's new pieces."""
        if self._done:
            return []
        thinking = self._part == "thought"
        self._found.push(TokenText.of(text, logprobs))
        pieces = list(self._advance())
        self._reasoning_tokens += thinking or self._part == "thought"
        return pieces

    def finish(
        self, reason: AnswerReason, *, stopped: bool = False
    ) -> tuple[list[AnswerPiece], AnswerReason]:
        """Return the answer's last pieces and its finish reason. The reason is "tool_calls" only if
        the tool calls are complete."""
        pieces = [] if self._done else list(self._rest(cut=reason != "stop", stopped=stopped))
        by_itself = reason == "stop" or (reason == "cancelled" and self._done)
        self._done = True
        made = self._calls > 0 and not self._is_unfinished
        return pieces, "tool_calls" if by_itself and made else reason

    def _advance(self) -> Iterator[AnswerPiece]:
        while not self._done:
            if self._part == "call":
                self._call.push(self._found.take_all().text)
                read = self._call.next()
                yield from self._written(self._call.certain())
                if read is None:
                    return
                yield from self._end_call(read)
                continue
            if self._part in ("start", "header"):
                if not (self._begin_bare() if self._part == "start" else self._read_header()):
                    return
                mention, self._mention = self._mention, TokenText()
                yield from self._shown(self._text_trimmer.push(mention))
                continue
            if self._is_formatted and self._part == "text" and self._found.is_at_text:
                self._found.look_for(())
            text, mark = self._found.take()
            if mark is not None and self._is_text(mark, text.text):
                yield from self._shown(self._trimmer.push(text + self._found.mark))
                continue
            yield from self._shown(self._trimmer.push(text) if self._trims else text)
            if mark is None:
                return
            if mark == self._unmarked:
                self._part, self._opening, self._is_fenced = "start", "", False
                self._found.put_back()
                continue
            self._enter(mark)

    def _is_text(self, mark: str, before: str) -> bool:
        """Return whether `mark` is only a mention in the text, for example in code."""
        part = self._opens[mark]
        line = self._found.line.removesuffix(mark)
        if mark == self._unmarked:
            return self._part != "text" or self._found.is_fenced or bool(line.strip())
        if self._part != "text" or part in ("call", "header"):
            return False
        if self._found.is_fenced:
            return True
        if part == "thought":
            return MENTIONS.search(line) is not None
        has_begun = self._text_trimmer.has_emitted or bool(before.strip())
        return part == "text" and self._has_thought and has_begun

    def _enter(self, mark: str) -> None:
        self._trimmer.mark()
        self._has_thought = self._has_thought or self._part == "thought"
        self._is_fenced = self._found.is_fenced
        self._found.begin()
        self._part = self._opens[mark] or self._part
        if self._part == "header":
            self._begin_header(mark)
        elif self._is_formatted:
            self._expect(*(("call",) if self._part != "thought" else ("text", "call")))

    # The beginning of an answer, or of a message

    def _begin_bare(self) -> bool:
        """Begin a call or text. Returns False until enough characters have arrived to decide."""
        held = self._found.held
        at = behind_space(held, 0)
        in_list = held.startswith(LIST_START, at)
        found = find_head(self._syntax.heads(in_list=in_list), held, at + in_list)
        if found.read == "some" or (in_list and at + 1 == len(held)):
            return False
        self._part = "call" if found.read == "all" and found.name in self._syntax.tools else "text"
        if self._part == "text" and not self._opening:
            self._found.take()
            self._mention, self._opening = self._found.mark, self._marks.start
        return True

    def _begin_header(self, mark: str) -> None:
        headers = self._headers
        if headers is not None:
            self._part = "header"
            self._header = TokenText(mark if mark in headers.starts else "")
            self._found.look_for((headers.end,))

    def _read_header(self) -> bool:
        """Read more of a message's header. Returns False if the header needs more text."""
        headers = self._headers
        if headers is None:
            return False
        text, mark = self._found.take()
        self._header += text
        header = self._header.text.lstrip()
        is_header = any(one.startswith(header) or header.startswith(one) for one in headers.begins)
        if not is_header or len(header) > _LONGEST_HEADER or _PROSE.search(header):
            whole = self._header + TokenText(mark or "") + self._found.take_all()
            begins = next((one for one in headers.starts if header.startswith(one)), "")
            self._mention, rest = whole.split(whole.text.find(begins) + len(begins))
            self._found.push(rest)
            self._found.look_for(tuple(self._opens))
            self._part = "text"
            return True
        if mark is None:
            return False
        self._found.look_for(tuple(self._opens))
        called = headers.call.search(header) if self._may_call else None
        if called is not None:
            self._part, self._opening = "call", header + mark
            name = called["name"]  # empty if the call's JSON contains the name
            self._given = f"{name}{mark}" if name else ""
            self._call.push(self._given)
        else:
            self._part = "thought" if headers.thought.search(header) else "text"
            self._follows_text = self._part == "text" and self._text_trimmer.has_emitted
            self._trimmer.mark()
        return True

    def _expect(self, *parts: _Part) -> None:
        self._found.look_for([mark for mark, part in self._opens.items() if part in parts])

    def _rest(self, *, cut: bool, stopped: bool) -> Iterator[AnswerPiece]:
        self._found.end()
        yield from self._advance()
        for _ in range(_MOST_OPEN):
            if self._part != "call" or self._done:
                break
            self._call.push(self._found.take_all().text)
            read = self._call.finish(cut=cut, stopped=stopped)
            yield from self._written(self._call.certain())
            if read is None:
                return
            self._is_unfinished = read.unfinished
            yield from self._end_call(read)
            yield from self._advance()
        if self._part == "header" and not cut and self._headers is not None:
            self._found.push(self._header + self._found.take_all())
            if self._headers.known.fullmatch(self._found.held):
                return
            self._part = "text"  # it was not a header
        if self._part in ("call", "header") or self._done:
            return
        if self._part == "start":
            self._part = "text"
        held = self._found.take_all()
        if not cut:
            yield from self._shown(self._trimmer.push(held))
        if self._part == "text":
            yield from self._shown(self._text_trimmer.flush())

    def _end_call(self, read: ReadCall) -> Iterator[AnswerPiece]:
        self._part = "text"
        self._found.begin(fenced=self._is_fenced)
        self._text_trimmer.mark()
        opening, self._opening = self._opening, self._marks.start
        problem = read.problem
        is_whole = read.closed or read.unfinished or not self._marks.end
        if not is_whole and not self._are_offered(read):
            problem = "it ends within an unknown tool name"
        if problem is not None:
            yield ToolCallFailed(problem)
            start = "" if read.follows else opening
            end = self._marks.end if read.closed and not read.follows else ""
            written = f"{start}{read.text.removeprefix(self._given)}{end}"
            yield from self._shown(self._text_trimmer.push(TokenText(written)))
            self._end_message(read.rest)
            self._done = read.follows and not self._many
            return
        self._end_message(read.rest)
        yield from self._written([CallPart(call.name, call.arguments) for call in read.calls])
        self._done = not self._many

    def _end_message(self, rest: str) -> None:
        self._found.push(TokenText(rest))
        self._begin_header("")

    def _are_offered(self, read: ReadCall) -> bool:
        return all(call.name in self._syntax.tools for call in read.calls)

    def _written(self, parts: Sequence[CallPart]) -> Iterator[AnswerPiece]:
        for part in parts:
            if part.name is not None:
                self._calls += 1
            index = self._calls - 1
            if index and not self._many:
                continue
            if part.name is not None:
                yield ToolCallStarted(index, self._new_id(), part.name)
            if part.arguments:
                yield ToolCallDelta(index, part.arguments)

    def _shown(self, text: TokenText) -> Iterator[AnswerPiece]:
        if self._part == "text":
            if self._follows_text and text.text:
                text, self._follows_text = _BETWEEN_TEXTS + text, False
            if text:
                yield TextDelta(text.text, text.values)
        elif text.text:
            yield ReasoningDelta(text.text)

    @property
    def _trimmer(self) -> Trimmer:
        return self._text_trimmer if self._part == "text" else self._thought_trimmer


def _marks(chat_format: ChatFormat, chat: Chat, unmarked: str) -> dict[str, _Part | None]:
    opens: dict[str, _Part | None] = dict.fromkeys(chat_format.silent_marks)
    headers = chat_format.headers
    if headers is not None:
        return dict.fromkeys((*headers.starts, *headers.ends), "header")
    if chat_format.thought_marks is not None:
        opens[chat_format.thought_marks.start] = "thought"
        opens[chat_format.thought_marks.end] = "text"
    if chat.may_call:
        opens |= dict.fromkeys((chat_format.call_marks.start, unmarked), "call")
        opens.setdefault(chat_format.call_marks.end, None)
    return {mark: part for mark, part in opens.items() if mark}


def _syntax(chat_format: ChatFormat, chat: Chat) -> CallSyntax:
    by_name = {tool.name: tool for tool in reversed(chat.tools)}
    headers, marks = chat_format.headers, chat_format.call_marks
    if headers is not None:
        marks = Marks(headers.starts[0], marks.end)
    return CallSyntax(marks, by_name, chat_format.call_spelling)


class AnswerMessage:
    """Collects an answer's pieces into the message that the client will repeat."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: dict[int, tuple[ToolCallStarted, list[str]]] = {}

    def add(self, piece: AnswerPiece) -> None:
        match piece:
            case TextDelta():
                self._text.append(piece.text)
            case ReasoningDelta():
                self._thought.append(piece.text)
            case ToolCallStarted():
                self._calls[piece.index] = (piece, [])
            case ToolCallDelta():
                self._calls[piece.index][1].append(piece.arguments)

    @property
    def message(self) -> Message:
        calls = tuple(
            ToolCall(call.id, call.name, "".join(arguments))
            for call, arguments in self._calls.values()
        )
        return Message("assistant", "".join(self._text), "".join(self._thought), calls)


def message_in(reader: AnswerReader, text: str) -> Message:
    """Return the whole answer `text` as a message; `reader` must be new."""
    collected = AnswerMessage()
    for piece in (*reader.push(text), *reader.finish("stop")[0]):
        collected.add(piece)
    return collected.message


class AnswerStream:
    """Turns the engine's events of one request into pieces of the answer. Without a `reader`, the
    whole answer is text."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._collected = AnswerMessage()
        self.n_tokens = 0  # of the answer; the model may have generated more

    @property
    def message(self) -> Message:
        return self._collected.message

    @property
    def done(self) -> bool:
        """True if the answer is complete, although the model may continue."""
        return self._reader is not None and self._reader.done

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.reasoning_tokens

    def token(self, event: TokenEvent) -> list[AnswerPiece]:
        """Return the pieces of the answer that become final with the next token."""
        self.n_tokens += not self.done
        logprobs = () if event.logprob is None else (event.logprob,)
        if self._reader is not None:
            return self._collect(self._reader.push(event.text, logprobs))
        return self._collect([TextDelta(event.text, logprobs)] if event.text or logprobs else [])

    def end(self, done: CompletedGeneration) -> tuple[list[AnswerPiece], AnswerReason]:
        """Return the answer's last pieces and its finish reason."""
        if self._reader is None:
            return [], done.finish_reason
        stopped = done.stop_string is not None
        pieces, reason = self._reader.finish(done.finish_reason, stopped=stopped)
        return self._collect(pieces), reason

    def _collect(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        for piece in pieces:
            self._collected.add(piece)
        return pieces
