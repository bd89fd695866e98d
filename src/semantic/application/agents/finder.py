"""AgentFinder and AgentNames: which agent a request without an agent name continues.

It is the agent whose last prompt is the longest prefix of the request's. Requests with a client
identity are matched among that identity's agents only: see `SessionAgents`. Knows digests of
prompts and which agents have a request in progress; no engine, no store and no text. Blocks are
shared by content whatever the name, so a wrong match costs only a name.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from semantic.application.agents.origin import Origin, origin_in, origin_of
from semantic.application.agents.sessions import SessionAgents
from semantic.application.cache.agent_note import note_of, parts_in
from semantic.application.chat.preparation import Prepared
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens
from semantic.domain.prefix import without_generation_prompt
from semantic.domain.request_parts import THREAD_MESSAGES, thread_of
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.serving import Ask

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_MAX_AGENTS = 10_000
"""Agents remembered, at most 2 kB each."""
_NAME_BYTES = 6
_AUTO_NAME = re.compile(r"auto-[0-9a-f]{12}")

_Owner = tuple[bytes, str]
"""A tenant's tag and an agent's name."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt: the digest of its full blocks, and the bytes of the tokens after them."""

    blocks: bytes
    tail: bytes


def is_auto_named(agent_id: str) -> bool:
    """Whether `AgentFinder` generated the name."""
    return _AUTO_NAME.fullmatch(agent_id) is not None


class AgentFinder:
    """Finds agents with generated names by their last prompt.

    An agent named by a client is never found: only a request with its name continues it. Prompts
    are looked up by the digest of their full blocks and compared only after those, so thousands of
    agents with a common prefix cost no more than a few. Not thread-safe: all calls are made on a
    server's event loop.
    """

    def __init__(self, tag: Callable[[str], bytes], max_agents: int = _MAX_AGENTS) -> None:
        """`tag` maps a tenant to its tag in manifests."""
        self._tag = tag
        self._max_agents = max_agents
        self._prompts: OrderedDict[_Owner, _Prompt] = OrderedDict()  # least recently used first
        self._by_blocks: dict[tuple[bytes, bytes], dict[str, None]] = {}
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
        """The agent that a prompt of `tokens` continues, or a new name.

        The agent whose last prompt is the longest prefix of `tokens`, of several the most recently
        used; never one that is `busy`. With an `origin`, an agent of that identity, see
        `SessionAgents.find`. Call `remember` to record the match.
        """
        tag = self._tag(tenant)
        if origin is not None:
            return self._sessions.find(tag, origin, tokens, busy, thread)
        packed = pack_tokens(tokens)
        digests = _digests(packed)
        for n_blocks in reversed(range(len(digests))):
            place = tag, digests[n_blocks]
            start = n_blocks * _BLOCK_BYTES
            found = self._longest(place, packed, start, busy)
            if found is not None:
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
        """Record the agent's last prompt, without its generation prompt.

        `thread` are the digests of its messages (see `thread_of`). Does nothing for an agent named
        by a client.
        """
        self._remember(agent_id, tokens, self._tag(tenant), origin, thread)

    def origin(self, agent_id: str, tenant: str) -> Origin | None:
        """The origin of an agent that was found by a client identity, else None."""
        return self._sessions.origin(self._tag(tenant), agent_id)

    def restore(self, manifests: Iterable[Manifest]) -> None:
        """Record saved agents, most recently used first."""
        for manifest in reversed(list(manifests)):
            prompt = manifest.token_ids[: manifest.prompt_tokens]
            origin = origin_in(manifest.note)
            thread = "" if origin is None else _thread_in(manifest.note)
            self._remember(manifest.agent_id, prompt, manifest.scope.tenant, origin, thread)

    def forget(self, agent_id: str, tenant: str) -> None:
        """Forget the agent: it is not found again."""
        self._drop((self._tag(tenant), agent_id))
        self._sessions.forget(self._tag(tenant), agent_id)

    def _remember(
        self,
        agent_id: str,
        tokens: Sequence[int],
        tag: bytes,
        origin: Origin | None,
        thread: str,
    ) -> None:
        if not tokens or self._sessions.remember(tag, agent_id, origin, tokens, thread):
            return
        if not is_auto_named(agent_id):
            return
        self._drop((tag, agent_id))
        packed = pack_tokens(tokens)
        digests = _digests(packed)
        prompt = _Prompt(digests[-1], packed[(len(digests) - 1) * _BLOCK_BYTES :])
        self._prompts[tag, agent_id] = prompt
        self._by_blocks.setdefault((tag, prompt.blocks), {})[agent_id] = None
        if len(self._prompts) > self._max_agents:
            self._drop(next(iter(self._prompts)))

    def _longest(
        self, place: tuple[bytes, bytes], packed: bytes, start: int, busy: Container[str]
    ) -> str | None:
        """Among agents with equal full blocks, the one with the longest tail that `packed` has at
        `start`."""
        best, best_length = None, -1
        for name in self._by_blocks.get(place, ()):  # least recently used first
            tail = self._prompts[place[0], name].tail
            if len(tail) >= best_length and name not in busy and packed.startswith(tail, start):
                best, best_length = name, len(tail)
        return best

    def _drop(self, owner: _Owner) -> None:
        prompt = self._prompts.pop(owner, None)
        if prompt is None:
            return
        tag, name = owner
        names = self._by_blocks[tag, prompt.blocks]
        del names[name]
        if not names:
            del self._by_blocks[tag, prompt.blocks]


class AgentNames:
    """Names the agents of requests in progress. Not thread-safe: for one event loop."""

    def __init__(self, finder: AgentFinder) -> None:
        self._finder = finder
        self._busy: dict[str, Counter[str]] = {}

    @contextmanager
    def claimed(self, prepared: Prepared, ask: Ask) -> Iterator[str]:
        """The agent's name; until the end, no request without a name is matched to the agent."""
        busy = self._busy.setdefault(ask.tenant, Counter())
        origin = _origin(prepared, ask)
        thread = "" if prepared.parts is None else thread_of(prepared.parts)
        agent = ask.agent or self._finder.find(prepared.tokens, ask.tenant, busy, origin, thread)
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
        """The note to save with `agent`: its origin, to find it after a restart, and the request's
        parts, to compare the next request with."""
        origin = self._finder.origin(agent, ask.tenant) or _origin(prepared, ask)
        return note_of("" if origin is None else origin.note(), prepared.parts)


def _origin(prepared: Prepared, ask: Ask) -> Origin | None:
    return None if ask.identity is None else origin_of(ask.identity, prepared.chat)


def _stable_prefix(prepared: Prepared) -> tuple[int, ...]:
    """The tokens that the agent's next prompt can be expected to repeat."""
    if prepared.chat is None:
        return prepared.tokens
    return prepared.tokens[: without_generation_prompt(len(prepared.tokens))]


def _thread_in(note: str) -> str:
    parts = parts_in(note, THREAD_MESSAGES)
    return "" if parts is None else thread_of(parts)


def _digests(packed: bytes) -> list[bytes]:
    """Digests of the first 0, 1, 2, ... full blocks."""
    running = hashlib.sha256()
    digests = [running.digest()]
    for start in range(0, len(packed) - len(packed) % _BLOCK_BYTES, _BLOCK_BYTES):
        running.update(packed[start : start + _BLOCK_BYTES])
        digests.append(running.copy().digest())
    return digests
