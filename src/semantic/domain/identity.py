"""Who asks, as a client tells it without being asked to: a session, and an agent within it.

A tag for people, for pins and for statistics. It never decides whose tokens are read: keys and
values are found by what a prompt says.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TypeGuard

LONGEST_TAG = 128
"""Characters of what a client calls a session or an agent."""

_LONGEST_PART = 100
"""Characters of a tag within a name; a longer one stands there as a digest."""
_DIGEST_DIGITS = 32
_ESCAPES = str.maketrans({"%": "%25", "/": "%2F", "~": "%7E"})
_NO_CLIENT = "session"
_NUMBER = "~"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks.

    `client` is the program, "" for one that is not known. `agent` is one of several in the session;
    None is the session's own. `parent` is the name of who began it. A tag is `shared` when many
    conversations at once may bear it, as one that names a user.
    """

    session: str
    client: str = ""
    agent: str | None = None
    parent: str | None = None
    shared: bool = False

    @property
    def name(self) -> str:
        """What the agent is called here."""
        return name_of(self.client, self.session, self.agent)

    def numbered(self, number: int) -> str:
        """What the agent number `number` of this identity is called; the first has no number."""
        return self.name if number == 1 else f"{self.name}{_NUMBER}{number}"

    def number(self, name: str) -> int | None:
        """The number by which an agent of this identity is called `name`; None for others."""
        own = self.name
        if name == own:
            return 1
        digits = name.removeprefix(own + _NUMBER)
        if digits == name or not (digits.isascii() and digits.isdigit()) or digits[0] == "0":
            return None
        return int(digits) if len(digits) <= len(str(1 << 63)) and int(digits) > 1 else None


def name_of(client: str, session: str, agent: str | None = None) -> str:
    """What an agent is called that nobody named; two of them are never called the same."""
    parts = (client or _NO_CLIENT, session) if agent is None else (client, session, agent)
    return "/".join(map(_part, parts))


def is_tag(text: object) -> TypeGuard[str]:
    """Whether `text` may stand for a session, an agent or a client."""
    return isinstance(text, str) and 1 <= len(text) <= LONGEST_TAG and text.isprintable()


def _part(tag: str) -> str:
    """A tag within a name: what divides names is escaped."""
    escaped = tag.translate(_ESCAPES)
    if len(escaped) <= _LONGEST_PART:
        return escaped
    whole = hashlib.sha256(tag.encode("utf-8", "surrogatepass"))
    return f"%x{whole.hexdigest()[:_DIGEST_DIGITS]}"  # no escaped tag has it
