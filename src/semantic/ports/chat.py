"""ChatFormat: a model's chat template, reasoning marks and tool-call syntax. Tests check these
contracts for every implementation, fakes included."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from semantic.domain.chat import Chat
from semantic.domain.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts around a part of an answer. With an empty `end`, the part ends with the answer."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as tokens, ending with the generation prompt. `opens_thought` is true if these
    tokens end inside reasoning, which the answer continues."""

    tokens: tuple[int, ...]
    opens_thought: bool = False


@dataclass(frozen=True, slots=True)
class CallHead:
    """The part of a tool call before its arguments: fixed texts, the tool's name, and `begin`.
    White space may surround each step. `name` matches the name, in its group "name"; with `quoted`,
    the name is a JSON string. `starts_name` matches an unfinished name. The arguments begin with a
    text in `begin`, or immediately if `begin` is empty."""

    before: tuple[str, ...]
    name: re.Pattern[str]
    starts_name: re.Pattern[str]
    after: tuple[tuple[str, ...], ...] = ()
    begin: tuple[str, ...] = ()
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class CallTags:
    """How a tool call writes its arguments in tags.

    An argument lasts from `start` to the last `end` before the next argument or the call's end. The
    value begins after the first `key_end`. `key` matches the text between `start` and `key_end`,
    with the key in its group "key". A group "kind" of `key` is the kind of the value: text for
    "string" and "true", else JSON. `call_end` ends the arguments; if `call_end` is empty, the end
    mark of the call ends them. Text between arguments has no meaning.

    `trims` says what the reader removes around a value: nothing, or a line break on either side.
    The marks of `wrap` may enclose a value. With `untyped_is_text`, a value without a type is text,
    even if it is valid JSON.
    """

    start: str
    key: re.Pattern[str]
    key_end: str
    end: str
    call_end: str = ""
    trims: Literal["line", "nothing"] = "nothing"
    wrap: tuple[str, str] = ("", "")
    untyped_is_text: bool = True


@dataclass(frozen=True, slots=True)
class CallList:
    """How a tool call writes its arguments as a list with commas. An argument consists of a key
    (the group "key" of the pattern `key`), `separator` and a value; `close` follows the last
    argument. A string stands between two equal marks from `quotes`; with `escapes` it may contain
    Python's escapes. Commas inside brackets belong to the value; `opening` and `closing` list the
    brackets in the same order."""

    key: re.Pattern[str]
    separator: str
    quotes: tuple[str, ...]
    close: str
    opening: str = ""
    closing: str = ""
    escapes: bool = False


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a model writes a tool call, unless it writes a JSON object with the tool's name. A call
    begins with `head`; a model may still write a JSON object instead. `arguments` is None for JSON;
    after `json_head`, arguments are always JSON. Any number of the texts in `between` can end a
    call; each text in `ends` can end the last call, like the end mark. `in_list` is true if calls
    occur only in a list. At the beginning of a line, `unmarked` begins a call without the start
    mark."""

    head: CallHead | None = None
    arguments: CallTags | CallList | None = None
    between: tuple[str, ...] = ()
    json_head: CallHead | None = None
    ends: tuple[str, ...] = ()
    in_list: bool = False
    unmarked: str = ""


@dataclass(frozen=True, slots=True)
class Headers:
    """An answer made of messages, each with a header that names its kind. A header lasts from a
    text in `starts` to `end`, and the answer begins inside a header; a text in `ends` ends a
    message. `thought` matches the header of reasoning. `call` matches the header of a tool call,
    with the tool's name in its group "name"; the message is then the call's arguments. A header's
    words begin with a text in `begins`, and `known` matches an unfinished header. `following`
    begins each further message. `answer` is the header of an answer's text, `remark` is the header
    of a text before a call."""

    starts: tuple[str, ...]
    end: str
    ends: tuple[str, ...]
    thought: re.Pattern[str]
    call: re.Pattern[str]
    begins: tuple[str, ...]
    known: re.Pattern[str]
    following: str
    answer: str
    remark: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a grammar makes a model write a call with JSON arguments. `before` and
    `after` are the texts around the arguments. In these texts, $name is the tool's name, $quoted
    the name as JSON; the model chooses a $number and an $id. `several` is the form of several
    calls: marks around each call, one pair of marks around all calls, or a list."""

    before: str = '{"name": $quoted, "arguments": '
    after: str = "}"
    several: Literal["marked", "within", "listed"] = "marked"


OBJECTS: Final = CallForm()
"""Calls as JSON objects with a name and arguments."""


class ChatFormat(Protocol):
    """One model's format for conversations, reasoning and tool calls. Thread-safe."""

    @property
    def thought_marks(self) -> Marks | None:
        """The marks of the model's reasoning; None if the model does not mark reasoning."""

    @property
    def thought_end_tokens(self) -> tuple[int, ...]:
        """The tokens of the end mark of reasoning inside an answer; empty if there are no marks."""

    @property
    def call_marks(self) -> Marks:
        """The marks around a tool call, or around a list of tool calls."""

    @property
    def headers(self) -> Headers | None:
        """The form of the headers of an answer's messages; None for a model without headers."""

    @property
    def loops_only(self) -> bool:
        """True if an answer's tokens stay valid in the history only while results of its tool calls
        follow. The template renders the answer differently once the user asks another question."""

    @property
    def silent_marks(self) -> tuple[str, ...]:
        """Marks without meaning around an answer's text, which the reader of answers can drop."""

    @property
    def bare_calls(self) -> bool:
        """True if an answer may begin with a tool call that has no start mark."""

    @property
    def call_spelling(self) -> CallSpelling | None:
        """The model's own form of tool calls; None for JSON objects with the tool's name."""

    def render(self, chat: Chat) -> RenderedChat:
        """Render the conversation with the model's template; system messages keep their order.
        Renders tools, and messages of role "tool", as text if the template does not support them.
        Raises InvalidRequestError if the template refuses the messages."""

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """Render the token that ends an answer, then all messages after the first `n_messages`.
        Message number `n_messages` is the assistant's. The content of the first `n_messages` does
        not change the result. Returns None if the template ends answers without a token. Raises
        InvalidRequestError if the template refuses the messages."""

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        """Return the grammar of an answer to `chat`; None for a free answer. A grammar is necessary
        for an answer format, a tool choice that requires a call, or a strict tool. Raises
        InvalidRequestError for a schema that cannot become a grammar."""
