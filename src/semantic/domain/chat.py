"""A conversation independent of any API: messages, tools and options of the answer.

A point is a digest of the conversation up to a message. Points ignore reasoning, which most clients
leave out of the history.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

from semantic.domain.identity import digest

_NAMES: Final = re.compile(r"[A-Za-z_][\w.:/-]{0,127}", re.ASCII)

Role = Literal["system", "developer", "user", "assistant", "tool"]

JsonSchema = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call by the assistant. `arguments` is JSON text, exactly as received."""

    id: str
    name: str
    arguments: str


def is_tool_name(name: str) -> bool:
    """Return whether `name` has the form of a tool's name."""
    return _NAMES.fullmatch(name) is not None


def replace_surrogates(text: str) -> str:
    """Return `text` with each lone surrogate, which UTF-8 cannot encode, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def numbered_call(number: int) -> str:
    """Return an id for a tool call without an id. `number` counts a conversation's calls from 0."""
    return f"call_{number}"


@dataclass(frozen=True, slots=True)
class Attachment:
    """A picture, sound or document in a message. A note with `what` replaces it in the text. Equal
    attachments have the same `digest`."""

    what: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One message. A "tool" message is the result of the call `tool_call_id`."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    attachments: tuple[Attachment, ...] = ()

    @property
    def length(self) -> int:
        """The number of characters of content and arguments, without reasoning."""
        return len(self.content) + sum(len(call.arguments) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. If `strict`, all calls match `parameters`."""

    name: str
    description: str = ""
    parameters: JsonSchema = field(default_factory=dict)
    strict: bool = False
    kind: str = "function"  # the client's name for this kind of tool; the model never sees it


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Says whether the model may ("auto"), must not ("none") or must ("required") call a tool. If
    `name` is given, the model may call only this tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Structured output: JSON that matches `schema`, or a text that matches a Lark `grammar`."""

    schema: JsonSchema | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the assistant continues."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    answer_format: AnswerFormat | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice.mode != "none"

    @property
    def fresh(self) -> tuple[Attachment, ...]:
        """The attachments in user messages since the last answer."""
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
        """The number of characters of all messages."""
        return sum(message.length for message in self.messages)


def in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return `messages` with tool results right after their answer, in the order of its calls.

    Without ids in the prompt, a model would confuse results in another order. Results without a
    tool call come last.
    """
    ordered: list[Message] = []
    calls: tuple[ToolCall, ...] = ()
    later: list[Message] = []  # messages after the calls
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


Point = bytes
Defaults = Mapping[str, Mapping[str, bytes]]
"""Default values as canonical JSON text, by tool name and argument name."""
_ENDS_OF_LINES = re.compile(r"[ \t\r]+(?=\n|\Z)")

_LARGEST_EXACT = 1 << 53
"""Up to this size, a float represents every integer exactly."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer and the conversation's tokens up to its end.

    A conversation cannot continue from a turn without `tokens`.
    """

    point: Point
    parent: bytes | None  # the digest of the previous turn
    start: int  # how many tokens the previous turn has
    tokens: tuple[int, ...]  # the tokens after those
    thought: bytes  # the digest of the answer's reasoning
    owner: bytes = field(default=b"", compare=False)  # the store counts a tenant's turns by it

    @property
    def end(self) -> int:
        """The number of the conversation's tokens up to the end of the turn."""
        return self.start + len(self.tokens)


def points(chat: Chat, scope: bytes, tool_texts: Sequence[bytes] | None = None) -> list[Point]:
    """Return the point before the first message and the point after each message.

    Points include tools and template options. `tool_texts` are the results of `tool_text`, if
    already computed.
    """
    options, defaults = canonical(dict(chat.template_options)), defaults_of(chat.tools)
    texts = map(tool_text, chat.tools) if tool_texts is None else tool_texts
    found = [digest("history-v1", scope, options, *texts)]
    for message in chat.messages:
        found.append(point_after(found[-1], message, defaults))
    return found


def defaults_of(tools: Sequence[Tool]) -> Defaults:
    """Return the default arguments in the schemas of `tools`."""
    found = {tool.name: tool.parameters.get("properties") for tool in tools}
    return {
        name: {
            key: canonical(schema["default"])
            for key, schema in properties.items()
            if isinstance(schema, Mapping) and "default" in schema
        }
        for name, properties in found.items()
        if isinstance(properties, Mapping)
    }


def point_after(point: Point, message: Message, defaults: Defaults = MappingProxyType({})) -> Point:
    """Return the point that follows `point` and `message`.

    Ignores what clients may drop: arguments equal to their `defaults`, and white space at the ends
    of lines.
    """
    content = message.content
    if message.role == "assistant":
        content = content.strip()  # APIs and clients trim answers
    calls = [
        field
        for call in message.tool_calls
        for field in (
            _text(call.id),
            _text(call.name),
            _arguments(call.arguments, defaults.get(call.name, {})),
        )
    ]
    fields = (message.role, content, message.tool_call_id or "", message.name or "")
    return digest("message-v1", point, *map(_text, fields), *calls)


def thought_digest(reasoning: str) -> bytes:
    """Return the digest of an answer's reasoning, without surrounding white space."""
    return digest("thought-v1", _text(reasoning.strip()))


def agrees(turn: Turn, message: Message) -> bool:
    """Return whether `message` has the same reasoning as `turn`, or has no reasoning."""
    return not message.reasoning.strip() or thought_digest(message.reasoning) == turn.thought


def answers(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message.role == "assistant"]


def tool_text(tool: Tool) -> bytes:
    """Return the canonical text of a tool."""
    return canonical([tool.name, tool.description, dict(tool.parameters), tool.strict])


def canonical(value: object) -> bytes:
    """Return `value` as canonical JSON: equal values have equal text."""
    return _text(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str))


def _arguments(text: str, defaults: Mapping[str, bytes]) -> bytes:
    """Return a tool call's arguments as canonical JSON, without those equal to `defaults`."""
    try:
        found = _trimmed(json.loads(text, parse_int=_number, parse_float=_number))
    except (ValueError, RecursionError):
        return _text(text)
    if isinstance(found, dict):
        found = {
            name: value
            for name, value in found.items()
            if name not in defaults or canonical(value) != defaults[name]
        }
    return canonical(found)


def _trimmed(value: object) -> object:
    """Return `value` without white space at the ends of lines."""
    if isinstance(value, str):
        return _ENDS_OF_LINES.sub("", value)
    if isinstance(value, list):
        return [_trimmed(one) for one in value]
    if isinstance(value, dict):
        return {name: _trimmed(one) for name, one in value.items()}
    return value


def _number(text: str) -> int | float:
    """Return the number in `text` as JavaScript does. Raises ValueError if it exceeds a float."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is too large")
    is_whole = number.is_integer() and abs(number) <= _LARGEST_EXACT
    return int(number) if is_whole else number


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
