"""ChatFormat: a model's chat template, reasoning marks and tool-call syntax. Tests hold every
implementation, fakes included, to these contracts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from semantic.domain.chat import Chat
from semantic.domain.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts that enclose a part of an answer. An empty `end` means the end of the answer."""

    start: str
    end: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as tokens, ending with the generation prompt. `opens_thought`: the prompt ends
    inside reasoning, which the answer continues."""

    tokens: tuple[int, ...]
    opens_thought: bool = False


@dataclass(frozen=True, slots=True)
class CallHead:
    """The head of a call before its arguments: texts, one name, and alternatives of texts.

    White space may surround each step. `name` finds the name, in its group "name"; `quoted`: it is
    a JSON string. `starts_name` matches the beginning of a name. The arguments begin with one of
    `begin`, or at once.
    """

    before: tuple[str, ...]
    name: re.Pattern[str]
    starts_name: re.Pattern[str]
    after: tuple[tuple[str, ...], ...] = ()
    begin: tuple[str, ...] = ()
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class CallTags:
    """The form of arguments in tags.

    An argument lasts from `start` to the `end` before another argument or the call's end. Its value
    begins after the first `key_end`; `key` matches the text between `start` and `key_end`, with the
    key in its group "key", and in a group "kind" the tag's kind of value: JSON, unless that is
    "string" or "true". `call_end`, or if empty the end mark, ends the arguments. Text between them
    has no meaning.

    `trims`: the layout around a value: nothing, or one line break on either side. A value may be
    within the marks of `wrap`. `untyped_is_text`: a value without a type is text, even if valid
    JSON.
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
    """The form of arguments one after the other, with commas between them.

    An argument is a key that `key` matches, in its group "key", `separator` and a value; `close`
    follows the last one. A string is between two of the same of `quotes`; with `escapes` it has
    Python's. Commas between brackets, `opening` and `closing` in the same order, are a value's.
    """

    key: re.Pattern[str]
    separator: str
    quotes: tuple[str, ...]
    close: str
    opening: str = ""
    closing: str = ""
    escapes: bool = False


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """The form of a model's call, if not a JSON object with its name.

    A call begins with `head`, or is such an object all the same. Without `arguments`, and behind
    `json_head`, the arguments are JSON. `between` has the ends of a call, any number of each, and
    `ends` those of all calls besides the end mark. `in_list`: only within a list of calls. At the
    beginning of a line `unmarked` begins a call too, without the start mark.
    """

    head: CallHead | None = None
    arguments: CallTags | CallList | None = None
    between: tuple[str, ...] = ()
    json_head: CallHead | None = None
    ends: tuple[str, ...] = ()
    in_list: bool = False
    unmarked: str = ""


@dataclass(frozen=True, slots=True)
class Headers:
    """An answer in messages, each with a header that names its kind.

    A header is between one of `starts` and `end`, and the answer begins within one; one of `ends`
    ends a message. `thought` matches in the header of reasoning, and `call` in that of a call, with
    the tool in its group "name"; its text goes on with the arguments. A header begins with one of
    `begins`, and `known` matches an unfinished one. Behind a message `following` begins the next
    one; `answer` is the header of an answer's text, and `remark` that of a text before a call.
    """

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
    """A call with arguments in JSON, as a grammar makes a model write it. `before` and `after` its
    arguments are texts; $name is the tool's, $quoted that in JSON, and the model chooses a $number
    and an $id. Several calls have marks each, follow each other within the marks, or are a list."""

    before: str = '{"name": $quoted, "arguments": '
    after: str = "}"
    several: Literal["marked", "within", "listed"] = "marked"


OBJECTS: Final = CallForm()
"""Objects with a name and arguments."""


class ChatFormat(Protocol):
    """One model's format of conversations, reasoning and tool calls. Thread-safe."""

    @property
    def thought_marks(self) -> Marks | None:
        """The marks of reasoning; None if this model has none."""

    @property
    def thought_end_tokens(self) -> tuple[int, ...]:
        """The tokens of `thought_marks.end` within an answer; none if this model has no marks."""

    @property
    def call_marks(self) -> Marks:
        """The marks of a tool call, or of a list of calls."""

    @property
    def headers(self) -> Headers | None:
        """The headers of an answer's messages, if any."""

    @property
    def loops_only(self) -> bool:
        """True if only an answer with calls continues in its own tokens, by their results: a later
        question changes the text before it."""

    @property
    def silent_marks(self) -> tuple[str, ...]:
        """Marks around the text of an answer, which say nothing."""

    @property
    def bare_calls(self) -> bool:
        """True if an answer may begin with a call without its start mark."""

    @property
    def call_spelling(self) -> CallSpelling | None:
        """How this model writes calls, if not as JSON objects with their names."""

    def render(self, chat: Chat) -> RenderedChat:
        """Render the conversation with the model's template; system messages keep their order. A
        template without support for tools, or for messages of role "tool", gets them as text.
        Raises InvalidRequestError if the template refuses the messages."""

    def render_after(self, chat: Chat, n_messages: int) -> RenderedChat | None:
        """Render what follows the first `n_messages`, the last of which is the assistant's: the
        token that ends an answer, then all later messages. Independent of the content of the first
        `n_messages`. None if the template has no such token. Raises InvalidRequestError if the
        template refuses the messages."""

    def call_grammar(self, chat: Chat, *, opens_thought: bool, tenant: str = "") -> Grammar | None:
        """Return the grammar of an answer to a tenant's `chat`; None without a constraint. An
        answer format, a tool choice that requires a call, and strict tools need one. Raises
        InvalidRequestError for a schema without a grammar."""
