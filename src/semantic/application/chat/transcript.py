"""Transcript: the messages of an agent's conversation, in the last line of its note.

Another process can continue the conversation with the transcript.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, get_args

from semantic.domain.chat import Message, Role, ToolCall
from semantic.domain.errors import InvalidRequestError

_MESSAGES: Final = "messages"
_START: Final = f'{{"{_MESSAGES}"'
_ROLES: Final[dict[str, Role]] = {role: role for role in get_args(Role)}
_TEXTS: Final = ("content", "reasoning", "tool_call_id", "name")
_FIELDS: Final = frozenset({"role", "tool_calls", *_TEXTS})
_CALL_FIELDS: Final = ("id", "name", "arguments")
MAX_TRANSCRIPT: Final = 1 << 19
"""The maximum number of characters in a transcript. Each turn saves its transcript."""


def transcript_of(messages: Sequence[Message]) -> str:
    """Return a line of JSON that `messages_in` reads; "" if the line is too long."""
    fields = {_MESSAGES: [_written(message) for message in messages]}
    text = json.dumps(fields, ensure_ascii=False)
    return text if len(text) <= MAX_TRANSCRIPT else ""


def messages_in(note: str) -> tuple[Message, ...] | None:
    """Return the messages in a note, or None. The last message must be from the user or a tool."""
    line = note.rpartition("\n")[2]
    if not line.startswith(_START):  # other texts may be long
        return None
    try:
        fields: object = json.loads(line)
        found = fields.get(_MESSAGES) if isinstance(fields, dict) else None
        messages = tuple(map(message_of, found)) if isinstance(found, list) else ()
    except (ValueError, RecursionError):  # InvalidRequestError is a ValueError
        return None
    return messages if messages and messages[-1].role in ("user", "tool") else None


def message_of(given: object) -> Message:
    """Return `given` as a message. `given` may be an object with a message's fields. Raises
    InvalidRequestError for anything else."""
    if isinstance(given, Message):
        return given
    if not isinstance(given, Mapping) or not {"role", "content"} <= given.keys() <= _FIELDS:
        raise InvalidRequestError(
            f'expected a Message or an object with "role" and "content", got {given!r:.200}'
        )
    role = given["role"]
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(f"role must be one of {', '.join(_ROLES)}, got {role!r:.80}")
    texts = {name: _text(name, given[name]) for name in _TEXTS if name in given}
    return Message(
        _ROLES[role],
        texts["content"],
        texts.get("reasoning", ""),
        _calls(given.get("tool_calls", ())),
        texts.get("tool_call_id"),
        texts.get("name"),
    )


def _calls(given: object) -> tuple[ToolCall, ...]:
    calls: Sequence[object] = given if isinstance(given, list | tuple) else [given]
    return tuple(map(_call, calls))


def _call(given: object) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    if not isinstance(given, Mapping) or given.keys() != set(_CALL_FIELDS):
        raise InvalidRequestError(
            f"tool_calls must be objects with {', '.join(_CALL_FIELDS)}, got {given!r:.200}"
        )
    return ToolCall(*(_text(name, given[name]) for name in _CALL_FIELDS))


def _text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise InvalidRequestError(f"{name} must be a string, got {type(given).__name__}")
    return given


def _written(message: Message) -> dict[str, object]:
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    for name in _TEXTS[1:]:
        value = getattr(message, name)
        if value:
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = [
            {name: getattr(call, name) for name in _CALL_FIELDS} for call in message.tool_calls
        ]
    return fields
