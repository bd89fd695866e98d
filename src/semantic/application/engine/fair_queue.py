"""FairQueue: the queue of requests that wait for blocks, fair between tenants and agents.

Knows requests; no pool, no backend, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from semantic.application.request import Request

_MAX_PASSED = 8
"""Requests that may be admitted past one that was first and did not fit; then none."""
_MAX_TRIED = 8
"""Requests tried per admission: each try searches the idle caches."""


_PREEMPTED, _PASSED, _IN_ORDER = range(3)


@dataclass(slots=True, eq=False)
class _Place:
    """A request in the queue.

    `arrived` is the number of requests admitted before it arrived, `passed` the number admitted
    past it while it was first.
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
        return _PASSED if self.passed >= _MAX_PASSED else _IN_ORDER


class FairQueue:
    """Waiting requests, in this order:

    1. preempted requests, in order of arrival, so that everything begun is finished;
    2. requests passed too often because they did not fit;
    3. by tenant: fewest running requests, then least recently served; within a tenant by agent:
       fewest running requests, then least recently served; of one agent in order of arrival.

    A request of 1 or 2 that does not fit is never passed. A new tenant or agent counts as served
    just before it arrived, so that a stream of new ones cannot starve the others.
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
        """Queue a new or preempted request."""
        self._places[request.uid] = _Place(request, self._admitted)

    def remove(self, request: Request) -> None:
        """Remove a request that was not served."""
        del self._places[request.uid]
        self._forget_idle()

    def first(self, running: Sequence[Request]) -> Request:
        """The first request, given the running ones. The queue must not be empty."""
        return self._in_order(running)[0].request

    def take(self, running: Sequence[Request], admit: Callable[[Request], bool]) -> Request | None:
        """Remove and return the first request for which `admit` succeeds; None if there is none."""
        tried: list[_Place] = []
        for place in self._in_order(running)[:_MAX_TRIED]:
            if admit(place.request):
                for earlier in tried:
                    earlier.passed += 1
                self._serve(place)
                return place.request
            if place.rank < _IN_ORDER:
                return None
            tried.append(place)
        return None

    def _in_order(self, running: Sequence[Request]) -> list[_Place]:
        """The next request of each agent, in order."""
        first: dict[tuple[int, str, str], _Place] = {}
        arrived: dict[str, int] = {}
        for place in sorted(self._places.values(), key=lambda place: place.request.number):
            first.setdefault((place.rank, *place.agent), place)
            arrived.setdefault(place.request.tenant, place.arrived)
        agents = Counter((request.tenant, request.agent_id) for request in running)
        tenants = Counter(request.tenant for request in running)

        def position(place: _Place) -> tuple[int, ...]:
            number, agent, tenant = place.request.number, place.agent, place.request.tenant
            if place.rank < _IN_ORDER:
                return (place.rank, number)
            return (
                place.rank,
                tenants[tenant],
                max(self._tenants_served.get(tenant, 0), arrived[tenant]),
                agents[agent],
                max(self._served.get(agent, 0), place.arrived),
                number,
            )

        return sorted(first.values(), key=position)

    def _serve(self, place: _Place) -> None:
        self._admitted += 1
        del self._places[place.request.uid]
        self._served[place.agent] = self._admitted
        self._tenants_served[place.agent[0]] = self._admitted
        self._forget_idle()

    def _forget_idle(self) -> None:
        """Forget tenants and agents without waiting requests: they return as new ones."""
        agents = {place.agent for place in self._places.values()}
        self._served = {agent: at for agent, at in self._served.items() if agent in agents}
        tenants = {tenant for tenant, _ in agents}
        self._tenants_served = {
            tenant: at for tenant, at in self._tenants_served.items() if tenant in tenants
        }
