"""The agent that a request is of, while it runs: named by its client, or found by its prompt.

Knows which agents have a request; neither engine nor store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from semantic.application.agents.finder import AgentFinder
from semantic.application.agents.origin import Origin, origin_of
from semantic.application.cache.agent_note import note_of
from semantic.application.chat.preparation import Prepared
from semantic.domain.prefix import without_generation_prompt
from semantic.domain.request_parts import thread_of
from semantic.ports.serving import Ask


class AgentNames:
    """Names the agents of requests. Not locked: one event loop makes all calls."""

    def __init__(self, finder: AgentFinder) -> None:
        self._finder = finder
        self._busy: dict[str, Counter[str]] = {}

    @contextmanager
    def claimed(self, prepared: Prepared, ask: Ask) -> Iterator[str]:
        """The agent's name. Until the end no request without a name is taken for this agent's."""
        busy = self._busy.setdefault(ask.tenant, Counter())
        origin = _origin(prepared, ask)
        thread = "" if prepared.parts is None else thread_of(prepared.parts)
        agent = ask.agent or self._finder.find(prepared.tokens, ask.tenant, busy, origin, thread)
        busy[agent] += 1
        self._finder.remember(agent, _without_opening(prepared), ask.tenant, origin, thread)
        try:
            yield agent
        finally:
            busy[agent] -= 1
            if not busy[agent]:
                del busy[agent]
            if not busy:
                self._busy.pop(ask.tenant, None)

    def note(self, agent: str, prepared: Prepared, ask: Ask) -> str:
        """What is to be kept with the claimed `agent`: so that it is found after a restart, and
        so that its next request can be compared with this one."""
        origin = self._finder.origin(agent, ask.tenant) or _origin(prepared, ask)
        return note_of("" if origin is None else origin.note(), prepared.parts)


def _origin(prepared: Prepared, ask: Ask) -> Origin | None:
    return None if ask.identity is None else origin_of(ask.identity, prepared.chat)


def _without_opening(prepared: Prepared) -> tuple[int, ...]:
    """What the agent's next prompt will surely begin with."""
    if prepared.chat is None:
        return prepared.tokens
    return prepared.tokens[: without_generation_prompt(len(prepared.tokens))]
