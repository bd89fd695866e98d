"""One answer as it is read: tokens become pieces, and what they say is collected.

Knows an answer's tokens and pieces; neither engine nor event loop.
"""

from __future__ import annotations

from semantic.application.chat.answer_message import Said
from semantic.application.chat.answer_reader import AnswerReader
from semantic.domain.answer import AnswerPiece, AnswerReason, TextDelta
from semantic.domain.value_objects import CompletedGeneration, TokenEvent


class Reading:
    """Reads one answer. A plain prompt's has no `reader`: it is all text."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self.said = Said()
        self.n_tokens = 0  # of the answer; the model may have written more

    @property
    def done(self) -> bool:
        """Whether the answer is complete, though the model may go on."""
        return self._reader is not None and self._reader.done

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thoughts."""
        return 0 if self._reader is None else self._reader.reasoning_tokens

    def token(self, event: TokenEvent) -> list[AnswerPiece]:
        """What is certain with one more token."""
        self.n_tokens += not self.done
        logprobs = () if event.logprob is None else (event.logprob,)
        if self._reader is not None:
            return self._heard(self._reader.push(event.text, logprobs))
        return self._heard([TextDelta(event.text, logprobs)] if event.text or logprobs else [])

    def end(self, done: CompletedGeneration) -> tuple[list[AnswerPiece], AnswerReason]:
        """What is left, and why the answer ended."""
        if self._reader is None:
            return [], done.finish_reason
        stopped = done.stop_string is not None
        pieces, reason = self._reader.finish(done.finish_reason, stopped=stopped)
        return self._heard(pieces), reason

    def _heard(self, pieces: list[AnswerPiece]) -> list[AnswerPiece]:
        for piece in pieces:
            self.said.hear(piece)
        return pieces
