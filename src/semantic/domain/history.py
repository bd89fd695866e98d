"""Where a conversation is, by content: a digest after each of its messages.

Two conversations are at one point when they say the same, however their clients wrote it down.
Thoughts do not count: most clients leave them out of what they send back. Knows no tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.domain.chat import Chat, Message, Tool
from semantic.domain.digest import digest

Point = bytes

_LARGEST_EXACT = 1 << 53
"""Up to here a float is every whole number."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, and in which tokens the conversation up to its end was computed.

    They are the first `start` tokens of the turn before, of which `parent` is the digest, then
    `tokens`: another turn may have come to that one's point since, in other tokens. Without
    `tokens` the answer was given, and cannot be gone on from. `thought` is the digest of what was
    thought before the answer.
    """

    point: Point
    parent: bytes | None
    start: int
    tokens: tuple[int, ...]
    thought: bytes

    @property
    def end(self) -> int:
        """How many tokens there are in all."""
        return self.start + len(self.tokens)


def points(chat: Chat, scope: bytes, tool_texts: Sequence[bytes] | None = None) -> list[Point]:
    """The point before any message, and the one after each; `scope` is what they are valid in.

    Tools and template options are at the beginning: where they differ, so does everything.
    `tool_texts` are those of `tool_text`, where they are known.
    """
    options = canonical(dict(chat.template_options))
    texts = map(tool_text, chat.tools) if tool_texts is None else tool_texts
    found = [digest("history-v1", scope, options, *texts)]
    for message in chat.messages:
        found.append(point_after(found[-1], message))
    return found


def point_after(point: Point, message: Message) -> Point:
    """The point that `message` leads to."""
    content = message.content
    if message.role == "assistant":
        content = content.strip()  # wires and clients trim answers, and mean nothing by it
    calls = [
        field
        for call in message.tool_calls
        for field in (_text(call.id), _text(call.name), _arguments(call.arguments))
    ]
    fields = (message.role, content, message.tool_call_id or "", message.name or "")
    return digest("message-v1", point, *map(_text, fields), *calls)


def thought_digest(reasoning: str) -> bytes:
    """What stands for a thought; white space around it does not count."""
    return digest("thought-v1", _text(reasoning.strip()))


def agrees(turn: Turn, message: Message) -> bool:
    """Whether `message` does not contradict what was thought in `turn`."""
    return not message.reasoning.strip() or thought_digest(message.reasoning) == turn.thought


def answers(messages: Sequence[Message]) -> list[int]:
    """The numbers of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message.role == "assistant"]


def tool_text(tool: Tool) -> bytes:
    """All that a tool is; in whatever order its schema is written."""
    return canonical([tool.name, tool.description, dict(tool.parameters), tool.strict])


def canonical(value: object) -> bytes:
    """JSON that says the same is the same text."""
    return _text(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str))


def _arguments(text: str) -> bytes:
    """JSON that says the same is the same, also to clients that know one kind of number only."""
    try:
        return canonical(json.loads(text, parse_int=_number, parse_float=_number))
    except (ValueError, RecursionError):
        return _text(text)


def _number(text: str) -> int | float:
    """A number as JavaScript has it, and sends it back: 1.0 is 1, and large ones are rounded.

    Raises ValueError for one that has no room in a float.
    """
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text:.40} is too large")
    is_whole = number.is_integer() and abs(number) <= _LARGEST_EXACT
    return int(number) if is_whole else number


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
