"""Points of a conversation: a digest after each of its messages, by content.

Conversations with equal content are at the same point, however their clients spell it. Reasoning
does not count: most clients leave it out of the history they send. Knows no tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from semantic.domain.chat import Chat, Message, Tool
from semantic.domain.identity import digest

Point = bytes
Defaults = Mapping[str, Mapping[str, bytes]]
"""Arguments that say nothing, by the name of the tool and theirs, as canonical text."""
_ENDS_OF_LINES = re.compile(r"[ \t\r]+(?=\n|\Z)")

_LARGEST_EXACT = 1 << 53
"""Largest range of integers that a float represents exactly."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, and the tokens of the conversation up to its end.

    These are the first `start` tokens of the previous turn, with the digest `parent`, then
    `tokens`; another turn may reach the same point in other tokens, hence the digest. Without
    `tokens` the turn is known, but nothing continues it. `thought` is the digest of the answer's
    reasoning. The store counts its tenant's turns under `owner`.
    """

    point: Point
    parent: bytes | None
    start: int
    tokens: tuple[int, ...]
    thought: bytes
    owner: bytes = field(default=b"", compare=False)

    @property
    def end(self) -> int:
        """Number of tokens up to the end of the turn."""
        return self.start + len(self.tokens)


def points(chat: Chat, scope: bytes, tool_texts: Sequence[bytes] | None = None) -> list[Point]:
    """The point before the first message and the one after each, valid within `scope`.

    Tools and template options are part of every point, since templates render them first.
    `tool_texts` are the results of `tool_text`, if already computed.
    """
    options, defaults = canonical(dict(chat.template_options)), defaults_of(chat.tools)
    texts = map(tool_text, chat.tools) if tool_texts is None else tool_texts
    found = [digest("history-v1", scope, options, *texts)]
    for message in chat.messages:
        found.append(point_after(found[-1], message, defaults))
    return found


def defaults_of(tools: Sequence[Tool]) -> Defaults:
    """The arguments that clients add to calls of `tools`: the defaults of their schemas."""
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
    """The point after `message`. Clients may leave out arguments that are `defaults`, and white
    space at the ends of lines: Claude Code does of its edits."""
    content = message.content
    if message.role == "assistant":
        content = content.strip()  # wires and clients trim answers
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
    """Digest of an answer's reasoning without surrounding white space."""
    return digest("thought-v1", _text(reasoning.strip()))


def agrees(turn: Turn, message: Message) -> bool:
    """Return whether the reasoning in `message`, if any, is that of `turn`."""
    return not message.reasoning.strip() or thought_digest(message.reasoning) == turn.thought


def answers(messages: Sequence[Message]) -> list[int]:
    """Indices of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message.role == "assistant"]


def tool_text(tool: Tool) -> bytes:
    """Canonical text of a tool, independent of the order of its schema's keys."""
    return canonical([tool.name, tool.description, dict(tool.parameters), tool.strict])


def canonical(value: object) -> bytes:
    """JSON in canonical form: equal values give equal text."""
    return _text(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str))


def _arguments(text: str, defaults: Mapping[str, bytes]) -> bytes:
    """Canonical JSON of a call's arguments without `defaults`, equal for clients with one number
    type only."""
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
    """`value` without white space at the ends of lines."""
    if isinstance(value, str):
        return _ENDS_OF_LINES.sub("", value)
    if isinstance(value, list):
        return [_trimmed(one) for one in value]
    if isinstance(value, dict):
        return {name: _trimmed(one) for name, one in value.items()}
    return value


def _number(text: str) -> int | float:
    """Return a number as JavaScript represents it: 1.0 is 1, large integers lose digits.

    Raises ValueError for one beyond the range of a float.
    """
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is too large")
    is_whole = number.is_integer() and abs(number) <= _LARGEST_EXACT
    return int(number) if is_whole else number


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
