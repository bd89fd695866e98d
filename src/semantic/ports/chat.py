"""A model's chat template, reasoning and tool calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from semantic.domain.chat import Chat
from semantic.domain.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts before and after a part of an answer, such as reasoning. If `end` is empty, the
    part extends to the end of the answer."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as tokens, with the generation prompt. `opens_thought` is true if the tokens
    end inside reasoning."""

    tokens: tuple[int, ...]
    opens_thought: bool = False


@dataclass(frozen=True, slots=True)
class CallHead:
    """The form of a tool call before its arguments. White space may surround each text."""

    before: tuple[str, ...]
    name: re.Pattern[str]
    """Matches the text with the tool's name. The name is in the group "name"."""
    starts_name: re.Pattern[str]
    """Matches the text with an unfinished name."""
    after: tuple[tuple[str, ...], ...] = ()
    begin: tuple[str, ...] = ()
    """Texts that begin the arguments. Each call has one of them."""
    quoted: bool = False
    """True if the name is a JSON string."""


@dataclass(frozen=True, slots=True)
class CallTags:
    """The form of a tool call's arguments as tags."""

    start: str
    """The text before an argument."""
    key: re.Pattern[str]
    """Matches an argument's key in the group "key", and the value's type in "kind"."""
    key_end: str
    """The text between an argument's key and value."""
    end: str
    """The text after an argument. Only its last occurrence before the next argument counts."""
    call_end: str = ""
    """The text that ends the arguments. It is "" if the end mark of the call ends them."""
    trims: Literal["line", "nothing"] = "nothing"
    """The line breaks to remove around a value."""
    wrap: tuple[str, str] = ("", "")
    """Marks that may surround an argument's value."""
    untyped_is_text: bool = True
    """True if a value without a type is text, not JSON."""


@dataclass(frozen=True, slots=True)
class CallList:
    """The form of a tool call's arguments as a list with commas."""

    key: re.Pattern[str]
    """Matches an argument's key. The key is in the group "key"."""
    separator: str
    """The text between an argument's key and value."""
    quotes: tuple[str, ...]
    """The quotation marks around a string."""
    close: str
    """The text after the last argument."""
    opening: str = ""
    """The opening brackets, in the order of `closing`."""
    closing: str = ""
    escapes: bool = False
    """True if strings may contain escapes as in Python."""


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """The form of a model's tool calls, if it is not a JSON object with the tool's name."""

    head: CallHead | None = None
    arguments: CallTags | CallList | None = None
    """The form of the arguments. None means JSON."""
    between: tuple[str, ...] = ()
    """Texts that may stand at the end of a call."""
    json_head: CallHead | None = None
    """The form before the arguments of calls whose arguments are JSON."""
    ends: tuple[str, ...] = ()
    """Texts that may stand at the end of the last call."""
    in_list: bool = False
    """True if calls occur only in a list."""
    unmarked: str = ""
    """The text that begins a call without a start mark. The text is at the beginning of a line."""


@dataclass(frozen=True, slots=True)
class Headers:
    """The form of an answer that consists of messages. A header names the kind of each message."""

    starts: tuple[str, ...]
    """Texts that begin a header."""
    end: str
    """The text that ends a header."""
    ends: tuple[str, ...]
    """Texts that end a message."""
    thought: re.Pattern[str]
    """Matches a header of reasoning."""
    call: re.Pattern[str]
    """Matches a header of a tool call. The tool's name is in the group "name"."""
    begins: tuple[str, ...]
    """Texts that begin the words of a header."""
    known: re.Pattern[str]
    """Matches an unfinished header."""
    following: str
    """The text that begins each message after the first."""
    answer: str
    """The header of the text of an answer."""
    remark: str
    """The header of a text that precedes a call."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a grammar makes a model write a tool call. In the texts, $name is the tool's name, and
    $quoted is the name as JSON. The model chooses a $number and an $id."""

    before: str = '{"name": $quoted, "arguments": '
    """The text before the arguments. The arguments are JSON."""
    after: str = "}"
    several: Literal["marked", "within", "listed"] = "marked"
    """How several calls are marked: each call by itself, all calls together, or as a list."""


OBJECTS: Final = CallForm()
"""The form of calls as JSON objects with a name and arguments."""


class ChatFormat(Protocol):
    """One model's format for conversations, reasoning and tool calls. Thread-safe."""

    @property
    def thought_marks(self) -> Marks | None:
        """The marks of reasoning. None means that the model does not mark reasoning."""

    @property
    def thought_end_tokens(self) -> tuple[int, ...]:
        """The tokens of the mark after reasoning. Empty if the model does not mark reasoning."""

    @property
    def call_marks(self) -> Marks:
        """The marks around a tool call, or around a list of tool calls."""

    @property
    def headers(self) -> Headers | None:
        """The headers of an answer's messages, or None."""

    @property
    def loops_only(self) -> bool:
        """True if the template renders an answer in another way after the user's next question."""

    @property
    def silent_marks(self) -> tuple[str, ...]:
        """Marks around an answer's text that mean nothing."""

    @property
    def bare_calls(self) -> bool:
        """True if an answer may begin with a tool call without a start mark."""

    @property
    def call_spelling(self) -> CallSpelling | None:
        """The model's own form of tool calls, or None for JSON objects with the tool's name."""

    def render(self, chat: Chat) -> RenderedChat:
        """Render the conversation with the model's chat template. If the template does not support
        tools, they become text. Raises InvalidRequestError if the template refuses the messages."""

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """Render the messages after the first `n_messages`, and the end of the answer before them.
        Returns None if the end of an answer is not a token. Raises InvalidRequestError if the
        template refuses the messages."""

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        """Return the grammar of an answer to `chat`. Returns None if the answer is free. Raises
        InvalidRequestError for a schema that cannot become a grammar."""
