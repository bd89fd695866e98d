"""SessionAgents: finds the agent of a client's session that a request continues.

A session id identifies the client, not the conversation: clients also request titles under the id.
A request therefore continues an agent only if their prompts or messages are similar.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from semantic.application.cache.agent_notes import Origin
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens
from semantic.domain.request_parts import SHORT, common_messages

_EACH = 16
"""Every prefix of a prompt up to this number of tokens has a digest. Longer prefixes have eight
digests for each doubling of the length."""
_PER_DOUBLING = 8
_DIGEST_BYTES = 8
"""The size of a digest in bytes. A collision only gives a request another agent's name."""


@dataclass(frozen=True, slots=True)
class PromptDigests:
    """Digests of a prompt's prefixes, and of the whole prompt."""

    n_tokens: int
    prefixes: bytes
    whole: bytes

    def common(self, other: PromptDigests) -> int:
        """Return the length, in tokens, of the longest digested prefix that both prompts share."""
        n = min(len(self.prefixes), len(other.prefixes)) // _DIGEST_BYTES
        same = bisect_left(range(n), True, key=lambda at: self._digest(at) != other._digest(at))
        return _length(same - 1) if same else 0

    def _digest(self, at: int) -> bytes:
        return self.prefixes[at * _DIGEST_BYTES : (at + 1) * _DIGEST_BYTES]


def digests_of(tokens: Sequence[int]) -> PromptDigests:
    """Return the digests of a prompt."""
    return digests_and_prefixes(tokens, ())[0]


def digests_and_prefixes(
    tokens: Sequence[int], lengths: Collection[int]
) -> tuple[PromptDigests, Mapping[int, bytes]]:
    """Return a prompt's digests, and the digests of its prefixes of the given `lengths`."""
    packed = memoryview(pack_tokens(tokens))
    n_tokens = len(tokens)
    grid = list(_lengths(n_tokens))
    digests: dict[int, bytes] = {}
    running = hashlib.sha256()
    done = 0
    wanted = {length for length in lengths if 0 < length <= n_tokens}
    for length in sorted({*grid, *wanted, n_tokens}):
        running.update(packed[done * TOKEN_BYTES : length * TOKEN_BYTES])
        digests[length] = running.copy().digest()[:_DIGEST_BYTES]
        done = length
    result = PromptDigests(
        n_tokens, b"".join(digests[length] for length in grid), digests[n_tokens]
    )
    return result, digests


def _lengths(n_tokens: int) -> Iterator[int]:
    at = 0
    while (length := _length(at)) <= n_tokens:
        yield length
        at += 1


def _length(at: int) -> int:
    if at < _EACH:
        return at + 1
    doubling, step = divmod(at - _EACH, _PER_DOUBLING)
    return (_EACH << doubling) + (step + 1) * ((_EACH << doubling) // _PER_DOUBLING)


_MAX_SIBLINGS = 64
"""The maximum number of agents with one client identity to compare."""
_WITH_TOOLS = frozenset({"claude-code", "codex", "opencode"})
"""Clients with tools in every conversation: their first request without tools asks for a title."""

_MIN_SHARED_MESSAGES = 2
"""The minimum number of messages that two requests of one conversation without tools share."""

_Group = tuple[bytes, str]
"""A tenant's tag, and the name of the identity's first agent."""


@dataclass(frozen=True, slots=True)
class _Member:
    origin: Origin
    prompt: PromptDigests
    thread: str


@dataclass(slots=True)
class _Agents:
    members: OrderedDict[str, _Member] = field(default_factory=OrderedDict)
    dropped: int = 0


class SessionAgents:
    """Finds the agents of client sessions. Not thread-safe."""

    def __init__(self, max_agents: int, max_siblings: int = _MAX_SIBLINGS) -> None:
        self._max_agents = max_agents
        self._max_siblings = max_siblings
        self._groups: dict[_Group, _Agents] = {}
        self._used: OrderedDict[tuple[bytes, str], _Group] = (
            OrderedDict()
        )  # least recently used first

    def __len__(self) -> int:
        return len(self._used)

    def find(
        self,
        tag: bytes,
        origin: Origin,
        tokens: Sequence[int],
        busy: Container[str],
        thread: str = "",
    ) -> str:
        """Return the agent that a prompt of `tokens` continues, or a new agent's name. The prompts
        must share half of the shorter prompt, or else most messages in `thread`."""
        group = self._groups.get((tag, origin.identity.name), _Agents())
        lengths = {member.prompt.n_tokens for member in group.members.values()}
        prompt, prefixes = digests_and_prefixes(tokens, lengths)
        best, best_rank = None, (False, 0, False)
        for name, member in group.members.items():
            if name in busy or member.origin.kind != origin.kind:
                continue
            before = member.prompt
            common = before.common(prompt)
            extends = prefixes.get(before.n_tokens) == before.whole
            if 2 * common >= min(before.n_tokens, prompt.n_tokens):
                rank = True, common, extends
            elif n_messages := _same_thread(member, thread):
                rank = False, n_messages, extends
            else:
                continue
            if rank >= best_rank:
                best, best_rank = name, rank
        return best or _new_name(origin, group, busy)

    def remember(
        self, tag: bytes, name: str, origin: Origin | None, tokens: Sequence[int], thread: str = ""
    ) -> bool:
        """Record the last prompt of an agent. Returns False without a client identity."""
        known = self.origin(tag, name)
        if known is not None and (origin is None or origin.identity.name != known.identity.name):
            origin = known
        if origin is None or origin.identity.number(name) is None:
            return False
        group = tag, origin.identity.name
        agents = self._groups.setdefault(group, _Agents())
        agents.members[name] = _Member(origin, digests_of(tokens), thread)
        agents.members.move_to_end(name)
        self._used[tag, name] = group
        self._used.move_to_end((tag, name))
        if len(agents.members) > self._max_siblings:
            self._drop(tag, next(iter(agents.members)))
        if len(self._used) > self._max_agents:
            self._drop(*next(iter(self._used)))
        return True

    def restore(
        self, tag: bytes, name: str, origin: Origin, prompt: PromptDigests, thread: str
    ) -> bool:
        """Add an agent as the least recently used. Returns False without a client identity."""
        number = origin.identity.number(name)
        if number is None:
            return False
        if (tag, name) in self._used or len(self._used) >= self._max_agents:
            return True
        group = tag, origin.identity.name
        agents = self._groups.setdefault(group, _Agents())
        if len(agents.members) >= self._max_siblings:
            agents.dropped = max(agents.dropped, number)
            return True
        agents.members[name] = _Member(origin, prompt, thread)
        agents.members.move_to_end(name, last=False)
        self._used[tag, name] = group
        self._used.move_to_end((tag, name), last=False)
        return True

    def origin(self, tag: bytes, name: str) -> Origin | None:
        """Return the origin of the agent `name`; None if the agent is unknown."""
        group = self._used.get((tag, name))
        return None if group is None else self._groups[group].members[name].origin

    def forget(self, tag: bytes, name: str) -> None:
        """Forget the agent and free its name."""
        group = self._used.pop((tag, name), None)
        if group is None:
            return
        del self._groups[group].members[name]
        if not self._groups[group].members:
            del self._groups[group]

    def _drop(self, tag: bytes, name: str) -> None:
        """Forget an agent that still exists, and reserve its name."""
        group = self._used[tag, name]
        agents = self._groups[group]
        number = agents.members[name].origin.identity.number(name) or 0
        agents.dropped = max(agents.dropped, number)
        self.forget(tag, name)


def _same_thread(member: _Member, thread: str) -> int:
    """Return the number of shared messages. Returns 0 below half of the shorter conversation."""
    common = common_messages(member.thread, thread)
    known = len(member.thread) // SHORT
    if not common or 2 * common * SHORT < min(len(member.thread), len(thread)):
        return 0
    is_whole = member.origin.has_tools and common == known
    return common if is_whole or common >= _MIN_SHARED_MESSAGES else 0


def _new_name(origin: Origin, group: _Agents, busy: Container[str]) -> str:
    identity = origin.identity
    no_tools = identity.client in _WITH_TOOLS and not origin.has_tools
    number = max(group.dropped, 1 if no_tools else 0) + 1
    while (name := identity.numbered(number)) in group.members or name in busy:
        number += 1
    return name
