"""Reads an answer while it is written: what is thought, what is said, which tools are called.

One reader serves streams and whole replies alike. Knows marks in a text; no tokens, no model and
no wire. What a call says is read by the model's `ChatFormat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from semantic.application.chat.answer_text import MarkFinder, TokenText, Trimmer
from semantic.application.chat.call_text import CallText, ReadCall
from semantic.domain.answer import (
    AnswerPiece,
    AnswerReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallFailed,
    ToolCallStarted,
)
from semantic.domain.chat import Chat
from semantic.domain.value_objects import TokenLogprob
from semantic.ports.chat import ChatFormat, WrittenCall

_Part = Literal["text", "thought", "call"]


class AnswerReader:
    """Sorts the text of one answer, in whatever pieces it comes, into `AnswerPiece`s.

    Marks are never given out, not even where they end what never began. White space beside a mark
    is dropped: templates put it there. Between two texts that only a mark divides it comes back.
    An answer without marks is not changed.

    Calls are looked for when the chat has tools and may call them, also inside a thought, which
    they end: a model that forgets to close a thought means its call. A call is given out when it
    is complete, with all of its arguments. One that cannot be read ends the answer; one that was
    cut is neither given out nor shown as text.

    Log-probabilities go with the text of their tokens. Those of tokens that begin in a thought, a
    call, a mark or dropped white space are not given out.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        chat: Chat,
        *,
        opens_thought: bool,
        new_id: Callable[[], str],
    ) -> None:
        """`opens_thought` is the rendered prompt's; `new_id` names the calls."""
        self._many = chat.parallel_tool_calls
        self._new_id = new_id
        self._opens = _marks(chat_format, chat)
        self._found = MarkFinder(tuple(self._opens))
        self._call = CallText(
            chat_format.call_marks, lambda text: chat_format.read_calls(text, chat.tools)
        )
        self._part: _Part = "thought" if opens_thought else "text"
        self._said = Trimmer(after_mark=opens_thought)
        self._thought = Trimmer(after_mark=True)
        self._calls = 0
        self._failed = False
        self._done = False
        self._reasoning_tokens = 0

    @property
    def done(self) -> bool:
        """Nothing of the answer is wanted any more: its request can be cancelled."""
        return self._done

    @property
    def reasoning_tokens(self) -> int:
        """How many pushes were of a thought, its marks included. Each push is one token's text."""
        return self._reasoning_tokens

    def push(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> list[AnswerPiece]:
        """The pieces that became certain with a token's `text`, which may be empty."""
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
        """The last pieces, and why the answer ended.

        `reason` is the engine's. An answer that stopped by itself, or was cancelled because it
        was `done`, ends in "tool_calls" when it made calls; one with a call that cannot be read
        ends in "error". What an end by "length" cut, a call or a mark, is dropped; so is a call
        that a stop string cut, which `stopped` the answer.
        """
        pieces = [] if self._done else list(self._rest(cut=reason != "stop", stopped=stopped))
        if self._failed:
            return pieces, "error"
        by_itself = reason == "stop" or (reason == "cancelled" and self._done)
        self._done = True
        return pieces, "tool_calls" if by_itself and self._calls else reason

    def _advance(self) -> Iterator[AnswerPiece]:
        """Read what was pushed, as far as it is certain."""
        while not self._done:
            if self._part == "call":
                self._call.push(self._found.take_all().text)
                read = self._call.next()
                if read is None:
                    return
                yield from self._end_call(read)
                continue
            text, mark = self._found.take()
            yield from self._shown(self._trimmer.push(text) if self._opens else text)
            if mark is None:
                return
            self._trimmer.mark()
            self._part = self._opens[mark] or self._part

    def _rest(self, *, cut: bool, stopped: bool) -> Iterator[AnswerPiece]:
        """What is left when the answer ends."""
        if self._part == "call":
            self._call.push(self._found.take_all().text)
            read = self._call.finish(cut=cut, stopped=stopped)
            if read is not None:
                yield from self._end_call(read)
            return
        held = self._found.take_all()
        if not cut:
            yield from self._shown(self._trimmer.push(held))
        if self._part == "text":
            yield from self._shown(self._said.flush())

    def _end_call(self, read: ReadCall) -> Iterator[AnswerPiece]:
        """Give out the calls that were read, or what is wrong with them."""
        self._part = "text"
        self._said.mark()
        self._found.push(TokenText(read.rest))
        if read.problem is not None:
            self._failed = self._done = True
            yield ToolCallFailed(read.text, read.problem)
            return
        self._done = not self._many
        for call in read.calls if self._many else read.calls[:1]:
            yield from self._called(call)

    def _called(self, call: WrittenCall) -> Iterator[AnswerPiece]:
        index, self._calls = self._calls, self._calls + 1
        yield ToolCallStarted(index, self._new_id(), call.name)
        yield ToolCallDelta(index, call.arguments)

    def _shown(self, text: TokenText) -> Iterator[AnswerPiece]:
        if self._part == "text":
            if text:
                yield TextDelta(text.text, text.values)
        elif text.text:
            yield ReasoningDelta(text.text)

    @property
    def _trimmer(self) -> Trimmer:
        return self._said if self._part == "text" else self._thought


def _marks(chat_format: ChatFormat, chat: Chat) -> dict[str, _Part | None]:
    """The marks to look for in an answer to `chat`, and what begins with each; None for nothing."""
    opens: dict[str, _Part | None] = {}
    if chat_format.thought_marks is not None:
        opens[chat_format.thought_marks.start] = "thought"
        opens[chat_format.thought_marks.end] = "text"
    if chat.tools and chat.tool_choice.mode != "none":
        opens[chat_format.call_marks.start] = "call"
        opens.setdefault(chat_format.call_marks.end, None)
    return {mark: part for mark, part in opens.items() if mark}
