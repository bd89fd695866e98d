"""ChatFormat: a model's chat template, reasoning marks and tool-call syntax.

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
    """Texts that enclose a part of an answer. An empty `end` means the end of the answer."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as tokens, ending with the generation prompt.

    `opens_thought`: the prompt ends inside reasoning, which the answer continues.
    """

    tokens: tuple[int, ...]
    opens_thought: bool = False


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call parsed from an answer; `arguments` is the JSON text of an object."""

    name: str
    arguments: str


class ChatFormat(Protocol):
    """One model's format of conversations, reasoning and tool calls. Thread-safe."""

    @property
    def thought_marks(self) -> Marks | None:
        """The marks of reasoning; None if this model has none."""
        ...

    @property
    def thought_end_tokens(self) -> tuple[int, ...]:
        """The tokens of `thought_marks.end` within an answer; none if this model has no marks."""
        ...

    @property
    def call_marks(self) -> Marks:
        """The marks of a tool call, or of a list of calls, depending on the model."""
        ...

    def render(self, chat: Chat) -> RenderedChat:
        """Render the conversation with the model's template; system messages keep their order.

        A template without support for tools, or for messages of role "tool", gets them as text.
        Raises InvalidRequestError if the template refuses the messages.
        """
        ...

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """Render what follows the first `n_messages`, the last of which is the assistant's: the
        token that ends an answer, then all later messages.

        Independent of the content of the first `n_messages`. None if the template has no such
        token. Raises InvalidRequestError if the template refuses the messages.
        """
        ...

    def read_calls(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """Parse the calls in the text between `call_marks`.

        `tools` give the types of arguments. A call of another tool, and arguments that are no JSON
        object, are returned as the model wrote them. Raises ToolCallError if there is no call.
        """
        ...

    def read_cut_calls(self, text: str, tools: Sequence[Tool]) -> list[WrittenCall]:
        """The calls in `text`, which follows a start mark and was cut anywhere.

        Of the last one the name and those arguments that are whole, as JSON that is not closed;
        not of one in JSON, which is read as it is written. Empty without a whole name.
        """
        ...

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        """The grammar of an answer to a tenant's `chat`; None if it is unconstrained.

        Needed for an answer format, a tool choice that requires a call, and strict tools. Raises
        InvalidRequestError for a schema that cannot be enforced.
        """
        ...
