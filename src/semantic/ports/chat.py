"""What a model's way of writing conversations offers to those who serve them.

Every implementation, fakes included, is tested against these contracts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from semantic.domain.chat import Chat, Tool
from semantic.domain.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts around something special. `end` may be empty: it lasts until the answer ends."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation in tokens, ready to be answered.

    `opens_thought` says that the prompt ends inside a thought: the answer begins with its rest.
    """

    tokens: tuple[int, ...]
    opens_thought: bool = False


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call read out of an answer; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class ChatFormat(Protocol):
    """How one model writes conversations, thoughts and tool calls. Any thread may call it."""

    @property
    def thought_marks(self) -> Marks | None:
        """Around a thought; None when this model marks none."""
        ...

    @property
    def call_marks(self) -> Marks:
        """Around a tool call, or around several (as this model writes them)."""
        ...

    def render(self, chat: Chat) -> RenderedChat:
        """The conversation by the model's template, system messages where they stand.

        A template that knows no tools, or no messages of role "tool", gets them as text.
        Raises InvalidRequestError when the template refuses the messages.
        """
        ...

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """What the template writes behind the first `n_messages`, the last of which is the
        assistant's: the token that ends an answer, then all later messages.

        It does not depend on what those messages say. None when this template has no such token.
        Raises InvalidRequestError when the template refuses the messages.
        """
        ...

    def read_calls(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """The calls in what stood between `call_marks`.

        Raises ToolCallError when there is none that names one of `tools` with an object of
        arguments.
        """
        ...

    def call_grammar(self, chat: Chat, *, opens_thought: bool) -> Grammar | None:
        """The language that an answer to `chat` must be in; None when it is free.

        For an answer format, for a tool choice that asks for a call, and for strict tools.
        Raises InvalidRequestError for a schema that cannot be enforced.
        """
        ...
