"""Which agent a request without a name is of: the one whose last prompt it goes on from.

Where its client says whose it is, only that one's agents are looked at: see `SessionAgents`. Knows
prompts by digests of their blocks; no engine, no store and no text. Sharing of blocks does not
depend on it: a wrong guess costs nothing but a name.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from semantic.application.agents.origin import Origin, origin_in
from semantic.application.agents.sessions import SessionAgents
from semantic.application.cache.agent_note import parts_in
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens
from semantic.domain.request_parts import THREAD_MESSAGES, thread_of
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import BLOCK_TOKENS

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_MOST_AGENTS = 10_000
"""Agents that are remembered, each with at most 2 kB."""
_NAME_BYTES = 6
_AUTO_NAME = re.compile(r"auto-[0-9a-f]{12}")

_Owner = tuple[bytes, str]
"""A tenant's tag and an agent's name."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt: the digest of its whole blocks, and the bytes of the tokens after them."""

    blocks: bytes
    tail: bytes


def is_auto_named(agent_id: str) -> bool:
    """Whether the name was given by `AgentFinder`: nobody chose it."""
    return _AUTO_NAME.fullmatch(agent_id) is not None


class AgentFinder:
    """Finds agents that nobody named by what they said last.

    An agent that somebody named is never found: only who knows its name may go on as it. Prompts
    are found by their whole blocks and compared only behind those, so thousands of agents that
    begin alike cost no more than few. Not locked: one thread makes all calls (a server's loop).
    """

    def __init__(
        self,
        tag: Callable[[str], bytes],
        is_known: Callable[[str, str], bool],
        most_agents: int = _MOST_AGENTS,
    ) -> None:
        """`tag` gives what stands for a tenant in manifests. `is_known(agent_id, tenant)` says
        whether there is still anything of an agent: one that was forgotten is not found."""
        self._tag = tag
        self._is_known = is_known
        self._most_agents = most_agents
        self._prompts: OrderedDict[_Owner, _Prompt] = OrderedDict()  # the last used last
        self._by_blocks: dict[tuple[bytes, bytes], dict[str, None]] = {}
        self._sessions = SessionAgents(most_agents)

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
        """The agent that a prompt of `tokens` goes on from, or a new name.

        That is the one with the longest prompt that `tokens` begin with, of several the one used
        last; none that is `busy`. With an `origin` it is an agent of that identity, see
        `SessionAgents.find`. It is not remembered until `remember` is called.
        """
        tag = self._tag(tenant)
        if origin is not None:
            return self._sessions.find(
                tag, origin, tokens, busy, lambda name: self._is_known(name, tenant), thread
            )
        packed = pack_tokens(tokens)
        digests = _digests(packed)
        for n_blocks in reversed(range(len(digests))):
            place = tag, digests[n_blocks]
            start = n_blocks * _BLOCK_BYTES
            while (found := self._longest(place, packed, start, busy)) is not None:
                if self._is_known(found, tenant):
                    return found
                self._drop((tag, found))
        return f"auto-{secrets.token_hex(_NAME_BYTES)}"

    def remember(
        self,
        agent_id: str,
        tokens: Sequence[int],
        tenant: str,
        origin: Origin | None = None,
        thread: str = "",
    ) -> None:
        """That the agent's next prompt will begin with `tokens`: those of its last one, without
        the marks that only open the answer; `thread` is what was said in it (see `thread_of`).
        Does nothing for an agent that somebody named."""
        self._remember(agent_id, tokens, self._tag(tenant), origin, thread)

    def origin(self, agent_id: str, tenant: str) -> Origin | None:
        """Where the requests of an agent come from that was found by an identity."""
        return self._sessions.origin(self._tag(tenant), agent_id)

    def restore(self, manifests: Iterable[Manifest]) -> None:
        """Remember agents as they were saved; the first is the one used last."""
        for manifest in reversed(list(manifests)):
            prompt = manifest.token_ids[: manifest.prompt_tokens]
            origin = origin_in(manifest.note)
            thread = "" if origin is None else _thread_in(manifest.note)
            self._remember(manifest.agent_id, prompt, manifest.scope.tenant, origin, thread)

    def forget(self, agent_id: str, tenant: str) -> None:
        """Find the agent no more."""
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
        if len(self._prompts) > self._most_agents:
            self._drop(next(iter(self._prompts)))

    def _longest(
        self, place: tuple[bytes, bytes], packed: bytes, start: int, busy: Container[str]
    ) -> str | None:
        """Of those with the same whole blocks the one whose tail is longest of those that
        `packed` has at `start`."""
        best, best_length = None, -1
        for name in self._by_blocks.get(place, ()):  # the last used last
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


def _thread_in(note: str) -> str:
    parts = parts_in(note, THREAD_MESSAGES)
    return "" if parts is None else thread_of(parts)


def _digests(packed: bytes) -> list[bytes]:
    """The digest of the first 0, 1, 2, ... whole blocks."""
    running = hashlib.sha256()
    digests = [running.digest()]
    for start in range(0, len(packed) - len(packed) % _BLOCK_BYTES, _BLOCK_BYTES):
        running.update(packed[start : start + _BLOCK_BYTES])
        digests.append(running.copy().digest())
    return digests
