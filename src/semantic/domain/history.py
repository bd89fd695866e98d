"""Where a conversation is, by content: a digest after each of its messages.

Two conversations are at one point when they say the same, however their clients wrote it down.
Thoughts do not count: most clients leave them out of what they send back. Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.domain.chat import Chat, Message, Tool
from semantic.domain.digest import digest

Point = bytes


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer, and in which tokens the conversation up to its end was computed.

    They are the first `start` tokens of the turn at `parent`, then `tokens`. `thought` is the
    digest of what was thought before the answer.
    """

    point: Point
    parent: Point | None
    start: int
    tokens: tuple[int, ...]
    thought: bytes


def points(chat: Chat, scope: bytes) -> list[Point]:
    """The point before any message, and the one after each; `scope` is what they are valid in.

    Tools and template options are at the beginning: where they differ, so does everything.
    """
    options = canonical(dict(chat.template_options))
    tools = [tool_text(tool) for tool in chat.tools]
    found = [digest("history-v1", scope, options, *tools)]
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
    """JSON that says the same is the same."""
    try:
        return canonical(json.loads(text))
    except (ValueError, RecursionError):
        return _text(text)


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
