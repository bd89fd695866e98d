"""The sender of a request: Identity, from a client's headers, and Hints.

They never affect the choice of a cache: the engine finds blocks by a prompt's content.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final, TypeGuard

from semantic.domain.errors import InvalidRequestError

MAX_TAG_LENGTH = 128
"""The maximum number of characters in a session, agent or client tag."""

_MAX_PART_LENGTH = 100
"""The maximum number of characters of a tag within a name."""
_DIGEST_DIGITS = 32
_OWNER_BYTES = 16
_ESCAPES = str.maketrans({"%": "%25", "/": "%2F", "~": "%7E"})
LONGEST_ABSENCE: Final = 86_400.0
"""The maximum of `Hints.back_in`, in seconds."""
MOST_PRIORITY: Final = 8
"""The highest `Hints.priority`; the lowest is its negative."""

CLAUDE_CODE: Final = "claude-code"
CODEX: Final = "codex"
OPENCODE: Final = "opencode"
AIPERF: Final = "aiperf"
_NO_CLIENT = "session"
_CLIENTS: Final = frozenset({CLAUDE_CODE, CODEX, OPENCODE, AIPERF, _NO_CLIENT})
_NUMBER = "~"


@dataclass(frozen=True, slots=True)
class Identity:
    """The agent that sends a request, as its client names it."""

    session: str
    client: str = ""  # the program; empty if unknown
    agent: str | None = None  # None: the session's main agent
    parent: str | None = None  # the name of the agent that started this one
    shared: bool = False  # several conversations use this identity at once

    @property
    def name(self) -> str:
        """The name of the identity's first agent."""
        return name_of(self.client, self.session, self.agent)

    def numbered(self, number: int) -> str:
        """Return the name of agent `number` of this identity; the first agent gets no number."""
        return self.name if number == 1 else f"{self.name}{_NUMBER}{number}"

    def number(self, name: str) -> int | None:
        """Return the number of the agent `name`; None if `name` belongs to another identity."""
        own = self.name
        if name == own:
            return 1
        digits = name.removeprefix(own + _NUMBER)
        if digits == name or not (digits.isascii() and digits.isdigit()) or digits[0] == "0":
            return None
        return int(digits) if len(digits) <= len(str(1 << 63)) and int(digits) > 1 else None


def name_of(client: str, session: str, agent: str | None = None) -> str:
    """Return the name of an agent. Distinct agents have distinct names."""
    parts = (client or _NO_CLIENT, session) if agent is None else (client, session, agent)
    return "/".join(map(_part, parts))


def home_of(name: str) -> str:
    """Return the name of the main agent in the session of the agent `name`."""
    client, _, rest = name.partition("/")
    if client not in _CLIENTS or not rest:
        return name
    session = rest.partition("/")[0]
    return f"{client}/{session.partition(_NUMBER)[0]}"


def is_tag(text: object) -> TypeGuard[str]:
    """Return whether `text` is a valid tag of a session, an agent or a client."""
    return isinstance(text, str) and 1 <= len(text) <= MAX_TAG_LENGTH and text.isprintable()


def _part(tag: str) -> str:
    escaped = tag.translate(_ESCAPES)
    if len(escaped) <= _MAX_PART_LENGTH:
        return escaped
    whole = hashlib.sha256(tag.encode("utf-8", "surrogatepass"))
    return f"%x{whole.hexdigest()[:_DIGEST_DIGITS]}"  # no escaped tag contains "%x"


@dataclass(frozen=True, slots=True)
class Hints:
    """Optional hints about an agent. Raises InvalidRequestError for values out of range."""

    done: bool = False  # this answer is the agent's last
    back_in: float | None = None  # seconds until the agent's next request
    priority: int = 0  # a tenant's requests with a higher priority run first
    drafts: bool = True  # steps may check drafts of the answer

    def __post_init__(self) -> None:
        if abs(self.priority) > MOST_PRIORITY:
            raise InvalidRequestError(
                f"priority: expected {-MOST_PRIORITY} to {MOST_PRIORITY}, got {self.priority}"
            )
        if self.back_in is None:
            return
        if not 0 <= self.back_in <= LONGEST_ABSENCE:
            raise InvalidRequestError(
                f"back_in: expected seconds from 0 to {LONGEST_ABSENCE:.0f}, got {self.back_in}"
            )
        if self.done:
            raise InvalidRequestError("back_in must not be given for a finished agent")


NO_HINTS: Final = Hints()


def digest(domain: str, *fields: bytes) -> bytes:
    """Return the SHA-256 of `domain` and `fields`. Different inputs hash different bytes."""
    hashed = hashlib.sha256()
    for field in (domain.encode(), *fields):
        hashed.update(len(field).to_bytes(8, "little"))
        hashed.update(field)
    return hashed.digest()


def turns_owner(tenant: str) -> bytes:
    """Return the owner of a tenant's turns in a store."""
    return digest("turns-owner-v1", tenant.encode("utf-8", "surrogatepass"))[:_OWNER_BYTES]
