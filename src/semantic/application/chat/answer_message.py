"""What an answer said, as the message that its client sends back with the next request.

Knows pieces of answers and messages; no wire.
"""

from __future__ import annotations

from semantic.domain.answer import (
    AnswerPiece,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from semantic.domain.chat import Message, ToolCall


class Said:
    """Collects the pieces of one answer."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._thought: list[str] = []
        self._calls: dict[int, tuple[ToolCallStarted, list[str]]] = {}

    def hear(self, piece: AnswerPiece) -> None:
        """The next piece."""
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
        """All of it."""
        calls = tuple(
            ToolCall(call.id, call.name, "".join(arguments))
            for call, arguments in self._calls.values()
        )
        return Message("assistant", "".join(self._text), "".join(self._thought), calls)
