"""AgentFinder and AgentNames: find the agent that a request without an agent's name continues.

A request continues the agent whose last prompt is the longest prefix of its own prompt. A session
id identifies the client, not the conversation, as clients also request titles under the id: prompts
or messages must be similar too. A wrong match affects only the name: requests share blocks by
content.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

from semantic.application.cache.agent_notes import Origin, note_of, origin_in, origin_of, parts_in
from semantic.application.chat.preparation import Prepared
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens
from semantic.domain.fair_share import FairLru
from semantic.domain.prefix import (
    PromptDigests,
    digests_and_prefixes,
    digests_of,
    without_generation_prompt,
)
from semantic.domain.request_parts import SHORT, THREAD_MESSAGES, Parts, common_messages, thread_of
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.serving import Ask

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_MAX_AGENTS = 10_000
"""The maximum number of agents to remember. An agent takes up to 2 kB."""
_NAME_BYTES = 6
_AUTO_NAME = re.compile(r"auto-[0-9a-f]{12}")

_Owner = tuple[bytes, str]
"""A tenant's tag and an agent's name."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    blocks: bytes
    tail: bytes


def is_auto_named(agent_id: str) -> bool:
    """Return whether `AgentFinder` generated the name."""
    return _AUTO_NAME.fullmatch(agent_id) is not None


class AgentFinder:
    """Finds an agent by its last prompt, among agents with generated names. Thread-safe."""

    def __init__(self, tag: Callable[[str], bytes], max_agents: int = _MAX_AGENTS) -> None:
        """`tag` returns a tenant's tag in manifests."""
        self._tag = tag
        self._max_agents = max_agents
        self._prompts: OrderedDict[_Owner, _Prompt] = OrderedDict()  # least recently used first
        self._by_blocks: dict[tuple[bytes, bytes], _Tails] = {}
        self._lock = threading.Lock()
        self._sessions = SessionAgents(max_agents)

    def __len__(self) -> int:
        return len(self._prompts) + len(self._sessions)

    def find(
        self,
        tokens: Sequence[int],
        tenant: str,
        busy: Container[str] = (),
        origin: Origin | None = None,
        thread: str = "",
    ) -> str:
        """Return the agent that a prompt of `tokens` continues, or a new name. Never returns a
        `busy` agent. If `origin` is given, considers only agents of that client identity."""
        tag = self._tag(tenant)
        if origin is not None:
            with self._lock:
                return self._sessions.find(tag, origin, tokens, busy, thread)
        packed = pack_tokens(tokens)
        digests = _digests(packed)
        with self._lock:
            for n_blocks in reversed(range(len(digests))):
                tails = self._by_blocks.get((tag, digests[n_blocks]))
                found = tails and tails.longest(packed[n_blocks * _BLOCK_BYTES :], busy)
                if found:
                    return found
        return f"auto-{secrets.token_hex(_NAME_BYTES)}"

    def remember(
        self,
        agent_id: str,
        tokens: Sequence[int],
        tenant: str,
        origin: Origin | None = None,
        thread: str = "",
    ) -> None:
        """Record the agent's last prompt, without its generation prompt. Ignores agents that a
        client named."""
        tag = self._tag(tenant)
        with self._lock:
            if not tokens or self._sessions.remember(tag, agent_id, origin, tokens, thread):
                return
            if not is_auto_named(agent_id):
                return
            self._drop((tag, agent_id))
            self._insert((tag, agent_id), tokens)
            if len(self._prompts) > self._max_agents:
                self._drop(next(iter(self._prompts)))

    def origin(self, agent_id: str, tenant: str) -> Origin | None:
        """Return the agent's origin; None for an agent without a client identity."""
        with self._lock:
            return self._sessions.origin(self._tag(tenant), agent_id)

    def restore(self, manifests: Iterable[Manifest]) -> None:
        """Add saved agents, most recently used first. Skips imported agents."""
        for manifest in manifests:
            if manifest.scope.salt:
                continue
            prompt = manifest.token_ids[: manifest.prompt_tokens]
            origin = origin_in(manifest.note)
            if prompt and (origin is not None or is_auto_named(manifest.agent_id)):
                self._restore(manifest, prompt, origin)

    def forget(self, agent_id: str, tenant: str | bytes) -> None:
        """Forget an agent. `tenant` is the tenant's name or tag."""
        tag = tenant if isinstance(tenant, bytes) else self._tag(tenant)
        with self._lock:
            self._drop((tag, agent_id))
            self._sessions.forget(tag, agent_id)

    def _restore(self, manifest: Manifest, prompt: Sequence[int], origin: Origin | None) -> None:
        name, tag = manifest.agent_id, manifest.scope.tenant
        if origin is not None:
            digests, thread = digests_of(prompt), _thread_in(manifest.note)
            with self._lock:
                if self._sessions.restore(tag, name, origin, digests, thread):
                    return
        owner = tag, name
        with self._lock:
            if not is_auto_named(name) or owner in self._prompts:
                return
            if len(self._prompts) < self._max_agents:
                self._insert(owner, prompt, oldest=True)

    def _insert(self, owner: _Owner, tokens: Sequence[int], *, oldest: bool = False) -> None:
        tag, name = owner
        packed = pack_tokens(tokens)
        digests = _digests(packed)
        prompt = _Prompt(digests[-1], packed[(len(digests) - 1) * _BLOCK_BYTES :])
        self._prompts[owner] = prompt
        self._prompts.move_to_end(owner, last=not oldest)
        tails = self._by_blocks.setdefault((tag, prompt.blocks), _Tails())
        tails.add(prompt.tail, name, oldest=oldest)

    def _drop(self, owner: _Owner) -> None:
        prompt = self._prompts.pop(owner, None)
        if prompt is None:
            return
        tag, name = owner
        tails = self._by_blocks[tag, prompt.blocks]
        tails.remove(prompt.tail, name)
        if not tails:
            del self._by_blocks[tag, prompt.blocks]


class _Tails:
    def __init__(self) -> None:
        self._names: dict[bytes, OrderedDict[str, None]] = {}  # least recently used first
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, tail: bytes, name: str, *, oldest: bool) -> None:
        if tail not in self._names:
            self._names[tail] = OrderedDict()
            self._lengths[len(tail)] += 1
        self._names[tail][name] = None
        self._names[tail].move_to_end(name, last=not oldest)

    def remove(self, tail: bytes, name: str) -> None:
        del self._names[tail][name]
        if not self._names[tail]:
            del self._names[tail]
            self._lengths[len(tail)] -= 1
            if not self._lengths[len(tail)]:
                del self._lengths[len(tail)]

    def longest(self, packed: bytes, busy: Container[str]) -> str | None:
        # one look-up for each length of a tail
        for length in sorted(self._lengths, reverse=True):
            names = self._names.get(packed[:length], ()) if length <= len(packed) else ()
            found = next((name for name in reversed(names) if name not in busy), None)
            if found is not None:
                return found
        return None


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


_MOST_CHARACTERS, _ENTRY = 8 << 20, 400
"""The maximum size of all known conversations; an agent takes `_ENTRY`, a message 8 characters."""
_MOST_COMPARED = 64
"""The maximum number of agents to compare with a new one."""


class Kinship:
    """Finds the agent that a new agent's first request continues: a fork without a name. Not
    thread-safe."""

    def __init__(self) -> None:
        self._threads: FairLru[str, tuple[str, bool]] = FairLru(_MOST_CHARACTERS)

    def parent(self, agent_id: str, tenant: str, parts: Parts | None) -> str | None:
        """Record an agent's request. If a new agent continues an answer of this server, returns the
        agent that had this answer, rather a parent than a child; else None."""
        if parts is None:
            return None
        thread = thread_of(parts, parts.n_messages)
        known = self._threads.peek(tenant, agent_id)
        found = None if known is not None else self._continued(tenant, thread, parts)
        is_child = found is not None if known is None else known[1]
        self._threads.put(tenant, agent_id, (thread, is_child), _ENTRY + len(thread))
        return found

    def _continued(self, tenant: str, thread: str, parts: Parts) -> str | None:
        asked = parts.n_replayed - parts.n_system - 1  # messages before the last known answer
        if asked < 1:
            return None
        found = [
            (is_child, name)
            for name, (other, is_child) in reversed(self._threads.latest(tenant, _MOST_COMPARED))
            if asked <= common_messages(thread, other) < len(thread) // SHORT
        ]
        return min(found, key=itemgetter(0))[1] if found else None


class SavedAgents:
    """Reads the saved agents into a finder on its own thread."""

    def __init__(self, finder: AgentFinder, manifests: Iterable[Manifest]) -> None:
        self._finder = finder
        self._manifests = manifests
        self._stopped = False
        self._done: Future[None] = Future()
        self._thread = threading.Thread(target=self._read, name="saved agents", daemon=True)

    def start(self) -> None:
        """Start the thread that reads the agents."""
        self._thread.start()

    async def known(self) -> None:
        """Wait until all saved agents are read."""
        if not self._done.done():
            await asyncio.wait([asyncio.wrap_future(self._done)])

    def stop(self) -> None:
        """Stop the thread, and wait until it no longer uses the store."""
        self._stopped = True
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self) -> None:
        try:
            self._finder.restore(itertools.takewhile(lambda _: not self._stopped, self._manifests))
        finally:
            self._done.set_result(None)


class AgentNames:
    """Names the agents of requests in progress. Not thread-safe."""

    def __init__(self, finder: AgentFinder, saved: SavedAgents | None = None) -> None:
        self._finder = finder
        self._saved = saved
        self._busy: dict[str, Counter[str]] = {}
        self._kinship = Kinship()

    async def ready(self, ask: Ask) -> None:
        """Wait until the finder can find the request's agent."""
        if self._saved is not None and not ask.agent:
            await self._saved.known()

    def close(self) -> None:
        """Stop reading saved agents."""
        if self._saved is not None:
            self._saved.stop()

    @contextmanager
    def claimed(self, prepared: Prepared, ask: Ask) -> Iterator[str]:
        """Yield the name of the request's agent, and reserve the agent during the `with` block."""
        busy = self._busy.setdefault(ask.tenant, Counter())
        origin = _origin(prepared, ask)
        thread = "" if prepared.parts is None else thread_of(prepared.parts)
        agent = ask.agent or self._finder.find(prepared.tokens, ask.tenant, busy, origin, thread)
        if not ask.keep:
            yield agent
            return
        busy[agent] += 1
        self._finder.remember(agent, _stable_prefix(prepared), ask.tenant, origin, thread)
        try:
            yield agent
        finally:
            busy[agent] -= 1
            if not busy[agent]:
                del busy[agent]
            if not busy:
                self._busy.pop(ask.tenant, None)

    def note(self, agent: str, prepared: Prepared, ask: Ask) -> str:
        """Return the note to save with `agent`."""
        origin = self._finder.origin(agent, ask.tenant) or _origin(prepared, ask)
        continued = self._kinship.parent(agent, ask.tenant, prepared.parts) if ask.keep else None
        first = "" if origin is None else origin.note()
        return note_of(first, prepared.parts, ask.note, continued)


def _origin(prepared: Prepared, ask: Ask) -> Origin | None:
    return None if ask.identity is None else origin_of(ask.identity, prepared.chat)


def _stable_prefix(prepared: Prepared) -> tuple[int, ...]:
    if prepared.chat is None:
        return prepared.tokens
    return prepared.tokens[: without_generation_prompt(len(prepared.tokens))]


def _thread_in(note: str) -> str:
    parts = parts_in(note, THREAD_MESSAGES)
    return "" if parts is None else thread_of(parts)


def _digests(packed: bytes) -> list[bytes]:
    running = hashlib.sha256()
    digests = [running.digest()]
    for start in range(0, len(packed) - len(packed) % _BLOCK_BYTES, _BLOCK_BYTES):
        running.update(packed[start : start + _BLOCK_BYTES])
        digests.append(running.copy().digest())
    return digests
