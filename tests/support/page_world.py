"""Servers whose pages have something to show: an engine that steps on request, and many agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from semantic.application.cache.agent_notes import origin_of
from semantic.domain.answer import TextDelta
from semantic.domain.identity import Identity
from semantic.domain.match import CacheMiss, MatchEnd, MatchReport
from semantic.domain.request_parts import Change, Difference, PartKind
from semantic.ports.agents import (
    EVERY_AGENT,
    AgentFilter,
    AgentPage,
    AgentsPort,
    AgentSummary,
    Place,
    Tenant,
)
from semantic.ports.serving import Ask
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import Script
from tests.support.http_server import RunningServer, running
from tests.support.runnable_serving import NoAgents, RunnableFake
from tests.support.served_agents import AgentsWorld

_CACHED = 40


def subagent(session: str, agent: str) -> str:
    """The note of a request of a subagent of Claude Code."""
    return origin_of(Identity(session, "claude-code", agent, f"claude-code-{session}"), None).note()


def scripted(ask: Ask) -> Script:
    """An answer to a long prompt, most of which was cached."""
    del ask
    lost = CacheMiss(5, 0.5, Difference(PartKind.TOOL, Change.CHANGED, 7, "Bash"))
    match = MatchReport(50, _CACHED, MatchEnd.DIVERGED, "pool", seconds=1.0, lost=lost)
    return Script((TextDelta("All "), TextDelta("well.")), cached=_CACHED, match=match)


@dataclass(slots=True)
class ManyAgents(NoAgents):
    """Implements `AgentsPort` for agents that are nowhere but in a list, newest first."""

    agents: Sequence[AgentSummary] = field(default_factory=tuple)
    pages: int = 0

    async def page(
        self, tenant: Tenant, limit: int, after: str | None = None, only: AgentFilter = EVERY_AGENT
    ) -> AgentPage:
        """See `AgentsPort.page`."""
        del tenant
        self.pages += 1
        found = [one for one in self.agents if one.id.startswith(only.prefix or "")]
        ids = [one.id for one in found]
        start = 0 if after is None else ids.index(after) + 1
        shown = found[start : start + limit]
        return AgentPage(tuple(shown), has_more=start + limit < len(found))


def summary(
    agent: str, used: float, place: Place = "disk", parent: str | None = None
) -> AgentSummary:
    """An idle agent of one block."""
    match = MatchReport(1000, 960, MatchEnd.COMPLETE, place, seconds=0.2)
    blocks: dict[Place, int] = {place: 1}
    return AgentSummary(
        agent, "m", "idle", 256, blocks, 1 << 20, 0, 0, False, 1, parent, used, match
    )


def context_of(agents: AgentsPort, script: Callable[[Ask], Script] = scripted) -> ServerContext:
    """The state of a server of `agents` that answers by `script`."""
    fake = RunnableFake(script)
    return ServerContext(fake, agents=agents, figures=fake.figures, version="1.2.3")


@contextmanager
def serving(
    agents: AgentsPort,
    settings: ServerSettings | None = None,
    port: int = 0,
    script: Callable[[Ask], Script] = scripted,
) -> Iterator[RunningServer]:
    """A server of `agents` that answers by `script`."""
    app = create_app(settings=settings, context=context_of(agents, script))
    with running(settings=settings, app=app, port=port) as server:
        yield server


def busy() -> AgentsWorld:
    """An engine with a decoding, a reading and a queued request, and idle agents in a tree."""
    served = AgentsWorld(total_blocks=60)
    served.turn("claude-code-s1", 600)
    served.turn("reviewer", 700, note=subagent("s1", "reviewer"))
    served.submit("decodes", 20, first=3)
    for _ in range(3):
        served.engine.step_once()
    served.submit("reads", 4000, first=5)
    served.submit("waits", 5000, first=7)
    return served
