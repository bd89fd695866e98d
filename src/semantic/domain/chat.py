"""Chat: a conversation independent of any API: messages, tools and options of the answer.

Keeps texts as they came. Knows neither wires nor templates nor tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

_NAMES: Final = re.compile(r"[A-Za-z_][\w.:/-]{0,127}", re.ASCII)

Role = Literal["system", "developer", "user", "assistant", "tool"]

JsonSchema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the assistant. `arguments` is JSON text, unchanged."""

    id: str
    name: str
    arguments: str


def is_tool_name(name: str) -> bool:
    """Return whether `name` may name a tool outside the offer. Some formats take everything before
    the arguments for the name."""
    return _NAMES.fullmatch(name) is not None


def replace_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate: JSON can spell one, UTF-8 cannot encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def numbered_call(number: int) -> str:
    """The id of a conversation's call `number`, which counts from 0, where calls have no other."""
    return f"call_{number}"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A picture, a sound or a document in a message, in whose text a note stands for it.

    `what` says so in the note's words; equal ones have the same `digest`.
    """

    what: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `tool_call_id` is the call whose result a message of role "tool" is."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    attachments: tuple[Attachment, ...] = ()

    @property
    def length(self) -> int:
        """Characters of content and arguments; not of reasoning, which a template may drop."""
        return len(self.content) + sum(len(call.arguments) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. With `strict`, calls always match `parameters`.

    `kind` is what its client takes it for: of no concern to the model.
    """

    name: str
    description: str = ""
    parameters: JsonSchema = field(default_factory=dict)
    strict: bool = False
    kind: str = "function"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The model may (auto), must not (none) or must (required) call a tool: the one with `name`, if
    given."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Structured output: the answer must be JSON, matching `schema` if given, or match `grammar`
    instead, which is in Lark's notation and begins with the rule `start`."""

    schema: JsonSchema | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the assistant continues.

    The chat template gets `template_options` (enable_thinking, reasoning_effort).
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    answer_format: AnswerFormat | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def may_call(self) -> bool:
        """True if the answer may contain calls."""
        return bool(self.tools) and self.tool_choice.mode != "none"

    @property
    def fresh(self) -> tuple[Attachment, ...]:
        """Attachments of users since the last answer."""
        found: list[Attachment] = []
        for message in reversed(self.messages):
            if message.role == "assistant":
                break
            if message.role == "user":
                found = [*message.attachments, *found]
        return tuple(found)

    @property
    def n_attachments(self) -> int:
        return sum(len(message.attachments) for message in self.messages)

    @property
    def length(self) -> int:
        """Characters of all messages."""
        return sum(message.length for message in self.messages)


def in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """`messages` with the results of an answer's calls right behind it, in the order of its calls.

    A client that runs calls at once sends results as they come, and most templates write no ids: a
    model would read each as another call's. Results that belong to no call stay behind the others.
    """
    ordered: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    later: list[Message] = []  # behind the calls
    for message in messages:
        if message.role == "assistant":
            ordered += [*_results_first(calls, later), message]
            calls, later = message.tool_calls, []
        else:
            later.append(message)
    return (*ordered, *_results_first(calls, later))


def _results_first(calls: Sequence[ToolCall], later: Sequence[Message]) -> Sequence[Message]:
    if not calls:
        return later
    places: dict[str, list[int]] = {}
    for place, call in reversed(list(enumerate(calls))):
        places.setdefault(call.id, []).append(place)
    results: dict[int, Message] = {}
    others = []
    for message in later:
        free = places.get(message.tool_call_id or "", []) if message.role == "tool" else []
        if free:
            results[free.pop()] = message
        else:
            others.append(message)
    return [*(results[place] for place in sorted(results)), *others]
