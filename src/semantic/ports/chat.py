"""A model's chat template, reasoning and tool calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from semantic.domain.chat import Chat
from semantic.domain.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts before and after a part of an answer. With an empty `end`, the part ends with the
    answer."""

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
    """The part of a tool call before its arguments. White space may surround each text."""

    before: tuple[str, ...]
    name: re.Pattern[str]
    """Matches the tool's name, in the group "name"."""
    starts_name: re.Pattern[str]
    """Matches an unfinished name."""
    after: tuple[tuple[str, ...], ...] = ()
    begin: tuple[str, ...] = ()
    """Texts of which one begins the arguments."""
    quoted: bool = False
    """True if the name is a JSON string."""


@dataclass(frozen=True, slots=True)
class CallTags:
    """How a tool call writes its arguments in tags."""

    start: str
    """The beginning of an argument."""
    key: re.Pattern[str]
    """Matches an argument's key, in the group "key", and the value's type, in the group "kind"."""
    key_end: str
    """The text between key and value."""
    end: str
    """The end of an argument: its last occurrence before the next argument."""
    call_end: str = ""
    """The end of the arguments; "" if the call's end mark ends them."""
    trims: Literal["line", "nothing"] = "nothing"
    """Line breaks to remove around a value."""
    wrap: tuple[str, str] = ("", "")
    """Marks that may surround a value."""
    untyped_is_text: bool = True
    """True if a value without a type is text, not JSON."""


@dataclass(frozen=True, slots=True)
class CallList:
    """How a tool call writes its arguments as a list with commas."""

    key: re.Pattern[str]
    """Matches an argument's key, in the group "key"."""
    separator: str
    """The text between key and value."""
    quotes: tuple[str, ...]
    """The marks around a string."""
    close: str
    """The text after the last argument."""
    opening: str = ""
    """Opening brackets, in the order of `closing`."""
    closing: str = ""
    escapes: bool = False
    """True if strings may contain Python's escapes."""


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a model writes a tool call, apart from a JSON object with the tool's name."""

    head: CallHead | None = None
    arguments: CallTags | CallList | None = None
    """The form of the arguments; None means JSON."""
    between: tuple[str, ...] = ()
    """Texts that may end a call."""
    json_head: CallHead | None = None
    """Another head, with JSON arguments after it."""
    ends: tuple[str, ...] = ()
    """Texts that may end the last call."""
    in_list: bool = False
    """True if calls occur only in a list."""
    unmarked: str = ""
    """Begins a call without the start mark, at the beginning of a line."""


@dataclass(frozen=True, slots=True)
class Headers:
    """An answer made of messages, each with a header that names its kind."""

    starts: tuple[str, ...]
    """Texts that begin a header."""
    end: str
    """The end of a header."""
    ends: tuple[str, ...]
    """Texts that end a message."""
    thought: re.Pattern[str]
    """Matches the header of reasoning."""
    call: re.Pattern[str]
    """Matches the header of a tool call, with the tool's name in the group "name"."""
    begins: tuple[str, ...]
    """Texts that begin a header's words."""
    known: re.Pattern[str]
    """Matches an unfinished header."""
    following: str
    """Begins each message after the first."""
    answer: str
    """The header of an answer's text."""
    remark: str
    """The header of a text before a call."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a grammar makes a model write a tool call. In its texts, $name is the tool's name and
    $quoted the name as JSON. The model chooses a $number and an $id."""

    before: str = '{"name": $quoted, "arguments": '
    """The text before the arguments, which are JSON."""
    after: str = "}"
    several: Literal["marked", "within", "listed"] = "marked"
    """The form of several calls: marks around each call, marks around all calls, or a list."""


OBJECTS: Final = CallForm()
"""Calls as JSON objects with name and arguments."""


class ChatFormat(Protocol):
    """One model's format for conversations, reasoning and tool calls. Thread-safe."""

    @property
    def thought_marks(self) -> Marks | None:
        """The marks of reasoning, or None without marks."""

    @property
    def thought_end_tokens(self) -> tuple[int, ...]:
        """The tokens of the end mark of reasoning; empty without marks."""

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
        """Marks without meaning around an answer's text."""

    @property
    def bare_calls(self) -> bool:
        """True if an answer may begin with a tool call without a start mark."""

    @property
    def call_spelling(self) -> CallSpelling | None:
        """The model's own form of tool calls, or None for JSON objects with the tool's name."""

    def render(self, chat: Chat) -> RenderedChat:
        """Render the conversation with the model's template. Tools become text if the template does
        not support them. Raises InvalidRequestError if the template refuses the messages."""

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """Render the end of an answer and the messages after the first `n_messages`, of which the
        answer is the last. Returns None if answers end without a token. Raises InvalidRequestError
        if the template refuses the messages."""

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        """Return the grammar of an answer to `chat`, or None for a free answer. Raises
        InvalidRequestError for a schema that cannot become a grammar."""
