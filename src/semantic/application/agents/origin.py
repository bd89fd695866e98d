"""Where an agent's requests come from: who asks, and for what kind of conversation.

It is the first line of the note of the agent's manifest. Knows no prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from semantic.domain.chat import Chat
from semantic.domain.digest import digest
from semantic.domain.identity import Identity, is_tag
from semantic.domain.stored import Manifest

_VERSION = 1
_START = '{"origin"'
_LONGEST_NAME = 256
_DIGEST_BYTES = 8
_TOOLS, _NO_TOOLS = "tools", "plain"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asks, and `kind`: requests of two kinds are never of the same conversation."""

    identity: Identity
    kind: str

    @property
    def has_tools(self) -> bool:
        """Whether its requests offer tools."""
        return self.kind.startswith(_TOOLS)

    def note(self) -> str:
        """A line that `origin_in` reads again."""
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
    """Where a request for `chat`, or for a plain prompt, comes from.

    A call for a title or a summary has no tools where the conversation has some. Where a tag is
    shared, the opening tells conversations apart as well: instructions may be the same in all.
    """
    kind = _TOOLS if chat is not None and chat.tools else _NO_TOOLS
    if identity.shared and chat is not None:
        kind = f"{kind}-{_opening(chat).hex()}"
    return Origin(identity, kind)


def origin_in(note: str) -> Origin | None:
    """The origin that a note's first line tells of; None for any other text."""
    if not note.startswith(_START):  # others may be long
        return None
    try:
        fields: object = json.loads(note.partition("\n")[0])
    except (ValueError, RecursionError):
        return None
    return _origin(fields) if isinstance(fields, dict) else None


def asker_in(note: str) -> tuple[str | None, str | None]:
    """The session and the client of an agent with this note, as far as they are told."""
    origin = origin_in(note)
    if origin is None:
        return None, None
    return origin.identity.session, origin.identity.client or None


def parent_of(manifest: Manifest) -> str | None:
    """The agent that this one was forked from, else the one whose client began it."""
    return manifest.parent if manifest.parent is not None else parent_in(manifest.note)


def parent_in(note: str) -> str | None:
    """The agent whose client began the one with this note."""
    origin = origin_in(note)
    return None if origin is None else origin.identity.parent


def children_of(parents: Mapping[str, str | None]) -> dict[str, tuple[str, ...]]:
    """The children of each agent that has some, by `parents`: each agent's own."""
    children: dict[str, list[str]] = {}
    for name, parent in parents.items():
        if parent is not None:
            children.setdefault(parent, []).append(name)
    return {parent: tuple(sorted(names)) for parent, names in children.items()}


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


def _opening(chat: Chat) -> bytes:
    """Stands for the messages up to the user's first."""
    said: list[bytes] = []
    for message in chat.messages:
        said += [message.role.encode(), message.content.encode("utf-8", "surrogatepass")]
        if message.role == "user":
            break
    return digest("opening-v1", *said)[:_DIGEST_BYTES]
