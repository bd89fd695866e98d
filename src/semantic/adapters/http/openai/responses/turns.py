"""Messages of a conversation that are put together from the items of a response.

An assistant's thought, text and calls are items of their own on this wire, and one message in a
conversation. Knows which belong together; not how an item is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from semantic.domain.chat import Message, ToolCall


@dataclass(slots=True)
class _Answer:
    """An assistant's message as far as its items have come."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def has_spoken(self) -> bool:
        return bool(self.content or self.calls)

    def message(self) -> Message:
        return Message(
            "assistant",
            "".join(self.content),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
        )


class Turns:
    """Takes items in order. Items with ids that follow each other are of one answer; without
    ids another text or thought after a text or a call is another message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._answer: _Answer | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that came so far."""
        self._end()
        return tuple(self._messages)

    def add(self, message: Message) -> None:
        """A whole message, of anybody but the assistant."""
        self._end()
        self._messages.append(message)

    def think(self, text: str, *, has_id: bool) -> None:
        """The assistant thought."""
        self._open(anew=not has_id).reasoning.append(text)

    def say(self, text: str, *, has_id: bool) -> None:
        """The assistant said."""
        self._open(anew=not has_id).content.append(text)

    def call(self, call: ToolCall) -> None:
        """The assistant called a tool."""
        self._open(anew=False).calls.append(call)

    def _open(self, *, anew: bool) -> _Answer:
        if self._answer is not None and anew and self._answer.has_spoken:
            self._end()
        if self._answer is None:
            self._answer = _Answer()
        return self._answer

    def _end(self) -> None:
        if self._answer is not None:
            self._messages.append(self._answer.message())
            self._answer = None
