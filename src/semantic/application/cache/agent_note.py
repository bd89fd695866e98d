"""The note in an agent's manifest: the origin of its requests, and the parts of the last one.

Each is one line of JSON with labels and digests, never text; usually some kilobytes, at most a
hundred. A line that the request itself has for the note comes last. Knows neither the store nor
what an origin contains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar, get_args

from semantic.domain.chat import Role
from semantic.domain.request_parts import (
    MAX_MESSAGES,
    SHORT,
    Answered,
    MessageDigest,
    Named,
    Parts,
    label,
)

T = TypeVar("T")

_START = '{"parts"'
_VERSION = 1
_ROLES: dict[str, Role] = {role[0]: role for role in get_args(Role)}


def note_of(origin: str, parts: Parts | None, last: str = "") -> str:
    """The note: the line `origin` (see `Origin.note`; "" for none), the parts, the line `last`."""
    lines = [origin] if origin else []
    if parts is not None:
        text = json.dumps(_written(parts), ensure_ascii=False, separators=(",", ":"))
        lines.append(text)
    if last:
        lines.append(last)
    return "\n".join(lines)


def parts_in(note: str, max_messages: int = MAX_MESSAGES) -> Parts | None:
    """The parts in a note; None for any other text and for notes of older versions.

    Reads only the first `max_messages` messages.
    """
    lines = note.split("\n", 2)[:2]  # other texts may be long
    line = next((one for one in lines if one.startswith(_START)), None)
    if line is None:
        return None
    try:
        return _read(json.loads(line), max_messages)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _written(parts: Parts) -> dict[str, object]:
    return {
        "parts": _VERSION,
        "options": [[one.name, one.digest] for one in parts.options],
        "tools": [[one.name, one.digest] for one in parts.tools],
        "messages": [
            f"{one.role[0]}{one.answered}{one.digest}{one.thought}" for one in parts.messages
        ],
        "n_messages": parts.n_messages,
        "kept": parts.n_replayed,
    }


def _read(fields: object, max_messages: int) -> Parts | None:
    """Raises KeyError, TypeError or ValueError for anything that `_written` does not write."""
    if not isinstance(fields, dict) or fields["parts"] != _VERSION:
        return None
    read = _is(list, fields["messages"])[:max_messages]
    messages = tuple(_message(_is(str, one)) for one in read)
    n_messages = _is(int, fields["n_messages"])
    n_replayed = _is(int, fields["kept"])
    if not 0 <= n_replayed <= n_messages or n_messages < len(messages):
        raise ValueError("counts")
    tools, options = (_named(_is(list, fields[name])) for name in ("tools", "options"))
    return Parts(options, tools, messages, n_messages, n_replayed)


def _named(pairs: Sequence[object]) -> tuple[Named, ...]:
    found = [_is(list, pair) for pair in pairs]
    # The file may have been written by another program.
    return tuple(Named(label(_is(str, name)), _is(str, digest)) for name, digest in found)


def _message(text: str) -> MessageDigest:
    role, answered, digests = _ROLES[text[:1]], Answered(text[1:2]), text[2:]
    return MessageDigest(role, digests[:SHORT], digests[SHORT:], answered)


def _is(kind: type[T], value: object) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value
