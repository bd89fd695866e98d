"""Origin: the client identity and kind of conversation that an agent's requests belong to.

Saved as the first line of the note in the agent's manifest; the parts of its last request follow.
A line is JSON with labels and digests, never text; a note has some kilobytes, at most a hundred.
Knows neither prompts nor the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar, get_args

from semantic.domain.chat import Chat, Role
from semantic.domain.identity import Identity, digest, is_tag
from semantic.domain.request_parts import (
    MAX_MESSAGES,
    SHORT,
    Answered,
    MessageDigest,
    Named,
    Parts,
    label,
)
from semantic.domain.stored import Manifest

T = TypeVar("T")

_AGENT_NOTE_START = '{"parts"'
_AGENT_NOTE_VERSION = 1
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
    line = next((one for one in lines if one.startswith(_AGENT_NOTE_START)), None)
    if line is None:
        return None
    try:
        return _read(json.loads(line), max_messages)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _written(parts: Parts) -> dict[str, object]:
    return {
        "parts": _AGENT_NOTE_VERSION,
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
    if not isinstance(fields, dict) or fields["parts"] != _AGENT_NOTE_VERSION:
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


_VERSION = 1
_START = '{"origin"'
_LONGEST_NAME = 256
_DIGEST_BYTES = 8
_TOOLS, _NO_TOOLS = "tools", "plain"


@dataclass(frozen=True, slots=True)
class Origin:
    """A client identity and a `kind`: requests of different kinds are different conversations."""

    identity: Identity
    kind: str

    @property
    def has_tools(self) -> bool:
        """Whether its requests offer tools."""
        return self.kind.startswith(_TOOLS)

    def note(self) -> str:
        """One line of JSON, read by `origin_in`."""
        one = self.identity
        fields = {
            "session": one.session,
            "client": one.client,
            "agent": one.agent,
            "parent": one.parent,
            "shared": one.shared,
            "kind": self.kind,
        }
        return json.dumps({"origin": _VERSION, **fields}, ensure_ascii=False)


def origin_of(identity: Identity, chat: Chat | None) -> Origin:
    """The origin of a request for `chat`, or for a plain prompt if None.

    Tools are part of the kind: clients request titles and summaries without tools under the
    conversation's identity. For a shared identity the first messages are, too: instructions may be
    equal in all its conversations.
    """
    kind = _TOOLS if chat is not None and chat.tools else _NO_TOOLS
    if identity.shared and chat is not None:
        kind = f"{kind}-{_first_messages(chat).hex()}"
    return Origin(identity, kind)


def origin_in(note: str) -> Origin | None:
    """The origin in a note's first line; None for any other text."""
    if not note.startswith(_START):  # other texts may be long
        return None
    try:
        fields: object = json.loads(note.partition("\n")[0])
    except (ValueError, RecursionError):
        return None
    return _origin(fields) if isinstance(fields, dict) else None


def session_and_client_in(note: str) -> tuple[str | None, str | None]:
    """The session and the client in a note, each None if unknown."""
    origin = origin_in(note)
    if origin is None:
        return None, None
    return origin.identity.session, origin.identity.client or None


def parent_of(manifest: Manifest) -> str | None:
    """The agent that this one was forked from, else its parent by client identity."""
    return manifest.parent if manifest.parent is not None else parent_in(manifest.note)


def parent_in(note: str) -> str | None:
    """The parent agent in a note, as its client identified it."""
    origin = origin_in(note)
    return None if origin is None else origin.identity.parent


def _origin(fields: Mapping[str, object]) -> Origin | None:
    if fields.get("origin") != _VERSION:
        return None
    session, kind = fields.get("session"), fields.get("kind")
    client, agent, parent = (fields.get(name) for name in ("client", "agent", "parent"))
    if not (is_tag(session) and is_tag(kind) and (client == "" or is_tag(client))):
        return None
    if not ((agent is None or is_tag(agent)) and _is_parent(parent)):
        return None
    identity = Identity(session, client, agent, parent, shared=fields.get("shared") is True)
    return Origin(identity, kind)


def _is_parent(text: object) -> TypeGuard[str | None]:
    if text is None:
        return True
    return isinstance(text, str) and 1 <= len(text) <= _LONGEST_NAME and text.isprintable()


def _first_messages(chat: Chat) -> bytes:
    """A digest of the messages up to the first of the user."""
    texts: list[bytes] = []
    for message in chat.messages:
        texts += [message.role.encode(), message.content.encode("utf-8", "surrogatepass")]
        if message.role == "user":
            break
    return digest("opening-v1", *texts)[:_DIGEST_BYTES]
