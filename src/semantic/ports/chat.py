"""ChatFormat: a model's chat template, reasoning marks and tool-call syntax.

Every implementation, fakes included, is tested against these contracts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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


@dataclass(frozen=True, slots=True)
class CallHead:
    """What precedes the arguments of a call: texts, one name, and alternatives of texts.

    White space may surround each step. `name` finds the name, in its group "name"; `quoted`: it is
    a JSON string. `starts_name` matches what could become a name. The arguments begin with `begin`.
    """

    before: tuple[str, ...]
    name: re.Pattern[str]
    starts_name: re.Pattern[str]
    after: tuple[tuple[str, ...], ...] = ()
    begin: str = ""
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class CallTags:
    """How arguments are written in tags.

    An argument lasts from `start` to the first `end`. Its value begins after the first
    `key_end`; `key` matches what is between `start` and `key_end`, with the key in its group "key".
    `call_end` ends the arguments; if it is empty, the end mark does. What is between arguments has
    no meaning.

    `trims`: what is no part of a value, all white space around it or one line break on either side.
    A value that begins with one of `other` may be more than its text, whatever its type is.
    """

    start: str
    key: re.Pattern[str]
    key_end: str
    end: str
    call_end: str = ""
    trims: Literal["space", "line", "nothing"] = "space"
    other: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallList:
    """How arguments are written one after the other, with commas between them.

    An argument is a key that `key` matches, in its group "key", `separator` and a value; `close`
    follows the last one. A string is between two of the same of `quotes`; with `escapes` it has
    Python's. Commas between brackets, `opening` and `closing` in the same order, are a value's. No
    value depends on its key. A call by itself is between `before` and `after`.
    """

    key: re.Pattern[str]
    separator: str
    quotes: tuple[str, ...]
    close: str
    opening: str = ""
    closing: str = ""
    escapes: bool = False
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a model writes a call, if not as JSON. `in_list`: only within a list of calls."""

    head: CallHead
    arguments: CallTags | CallList
    in_list: bool = False


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

    @property
    def call_spelling(self) -> CallSpelling | None:
        """How `read_calls` expects calls to be written, if not as JSON; None if that is not known.

        Each argument is read by itself: `read_calls` gives the same of a call with it alone.
        """
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

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        """The grammar of an answer to a tenant's `chat`; None if it is unconstrained.

        Needed for an answer format, a tool choice that requires a call, and strict tools. Raises
        InvalidRequestError for a schema that cannot be enforced.
        """
        ...
