"""Requests that wait for blocks, and whose turn it is.

Fair between tenants and, within one, between agents. Knows requests as they are; no pool, no
backend, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from semantic.application.request import Request

_MOST_PASSED = 8
"""So many may be admitted past a request that had its turn and did not fit; then nobody."""
_MOST_TRIED = 8
"""Requests that are offered blocks in one round: each offer costs a look through idle caches."""


_PREEMPTED, _HELD_UP, _IN_TURN = range(3)


@dataclass(slots=True, eq=False)
class _Place:
    """A request in the queue.

    `arrived` is how many requests had been admitted when it came, `passed` how many were
    admitted past it while it had its turn.
    """

    request: Request
    arrived: int
    passed: int = 0

    @property
    def agent(self) -> tuple[str, str]:
        return self.request.tenant, self.request.agent_id

    @property
    def rank(self) -> int:
        if self.request.preemptions:
            return _PREEMPTED
        return _HELD_UP if self.passed >= _MOST_PASSED else _IN_TURN


class FairQueue:
    """Waiting requests, given their turns in this order:

    1. who was preempted, in order of arrival: all that was begun comes to its end;
    2. who was passed too often because it did not fit;
    3. of the tenant with the fewest running requests, then the one served longest ago, the
       agent with the fewest, then the one served longest ago; among its own, in order of arrival.

    When a request of 1 or 2 does not fit, nobody passes it. Whoever comes anew counts as served
    just before, so that a stream of newcomers cannot starve anybody.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._served: dict[tuple[str, str], int] = {}
        self._tenants_served: dict[str, int] = {}
        self._admitted = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return iter([place.request for place in self._places.values()])

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(self._places)

    def push(self, request: Request) -> None:
        """Let `request` wait: one that just came, or one that was preempted."""
        self._places[request.uid] = _Place(request, self._admitted)

    def remove(self, request: Request) -> None:
        """`request` waits no more, and was not served."""
        del self._places[request.uid]
        self._forget_idle()

    def first(self, running: Sequence[Request]) -> Request:
        """Whose turn it is beside those that run. The queue must not be empty."""
        return self._in_turn(running)[0].request

    def take(self, running: Sequence[Request], admit: Callable[[Request], bool]) -> Request | None:
        """Remove and return the first one in turn that `admit` gives blocks to, if there is one."""
        tried: list[_Place] = []
        for place in self._in_turn(running)[:_MOST_TRIED]:
            if admit(place.request):
                for earlier in tried:
                    earlier.passed += 1
                self._serve(place)
                return place.request
            if place.rank < _IN_TURN:
                return None
            tried.append(place)
        return None

    def _in_turn(self, running: Sequence[Request]) -> list[_Place]:
        """Of each agent the request that is next, in turn."""
        first: dict[tuple[int, str, str], _Place] = {}
        arrived: dict[str, int] = {}
        for place in sorted(self._places.values(), key=lambda place: place.request.number):
            first.setdefault((place.rank, *place.agent), place)
            arrived.setdefault(place.request.tenant, place.arrived)
        agents = Counter((request.tenant, request.agent_id) for request in running)
        tenants = Counter(request.tenant for request in running)

        def turn(place: _Place) -> tuple[int, ...]:
            number, agent, tenant = place.request.number, place.agent, place.request.tenant
            if place.rank < _IN_TURN:
                return (place.rank, number)
            return (
                place.rank,
                tenants[tenant],
                max(self._tenants_served.get(tenant, 0), arrived[tenant]),
                agents[agent],
                max(self._served.get(agent, 0), place.arrived),
                number,
            )

        return sorted(first.values(), key=turn)

    def _serve(self, place: _Place) -> None:
        self._admitted += 1
        del self._places[place.request.uid]
        self._served[place.agent] = self._admitted
        self._tenants_served[place.agent[0]] = self._admitted
        self._forget_idle()

    def _forget_idle(self) -> None:
        """Who waits for nothing comes back as a newcomer: nothing is to be known of them."""
        agents = {place.agent for place in self._places.values()}
        self._served = {agent: at for agent, at in self._served.items() if agent in agents}
        tenants = {tenant for tenant, _ in agents}
        self._tenants_served = {
            tenant: at for tenant, at in self._tenants_served.items() if tenant in tenants
        }
