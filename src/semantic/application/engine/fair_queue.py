"""FairQueue: the queue of requests that wait for blocks, fair between tenants and agents."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter, itemgetter
from typing import TypeAlias

from semantic.application.request import Request

_MAX_PASSED = 8
"""The maximum number of requests that may overtake a request that does not fit."""
_MAX_TRIED = 8
"""The maximum number of requests to try per admission. Each try searches the idle caches."""
_PER_PRIORITY = 256
"""The number of admissions that one level of priority is worth. A lower priority thus does not wait
forever."""


_PREEMPTED, _PASSED, _IN_ORDER = range(3)
_turn, _without_place = attrgetter("turn"), itemgetter(0, 1)


_Entry: TypeAlias = tuple[int, int, int, str]
"""The sort key of an agent."""
_TenantEntry: TypeAlias = tuple[int, int, int, str]
"""The sort key of a tenant, without priorities."""


@dataclass(slots=True, eq=False)
class _Place:
    """A request in the queue. `passed` is the number of requests that overtook it."""

    request: Request
    arrived: int
    rank: int
    passed: int = 0

    @property
    def lead(self) -> int:
        """The number of admissions that the request's priority is worth."""
        return _PER_PRIORITY * self.request.hints.priority

    @property
    def turn(self) -> tuple[int, int]:
        return self.arrived - self.lead, self.request.number


@dataclass(slots=True)
class _Agent:
    # `places` leaves out requests that were preempted or overtaken too often.

    served: int = 0
    n_waiting: int = 0
    places: list[_Place] = field(default_factory=list)
    entry: _Entry | None = None


@dataclass(slots=True)
class _Tenant:
    # `order` lists the agents with `places`, next agent first. `arrivals` has each request's number
    # and arrival.

    served: int = 0
    agents: dict[str, _Agent] = field(default_factory=dict)
    order: list[_Entry] = field(default_factory=list)
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    entry: _TenantEntry | None = None

    @property
    def since(self) -> int:
        """The time of the tenant's last service, or of its arrival if that is later."""
        return max(self.served, self.arrivals[0][1])


class FairQueue:
    """Waiting requests, in this order:

    1. preempted requests, in order of arrival;
    2. requests that others have overtaken too often;
    3. requests of the tenant, then the agent, with the fewest running requests.

    Among equals, the least recently served goes first. Priority orders only one tenant's requests.
    """

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._early: list[tuple[int, int, _Place]] = []  # before the order: rank, number
        self._tenants: dict[str, _Tenant] = {}
        self._order: list[_TenantEntry] = []
        self._admitted = 0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return iter([place.request for place in self._places.values()])

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(self._places)

    def push(self, request: Request) -> None:
        rank = _PREEMPTED if request.preemptions else _IN_ORDER
        place = _Place(request, self._admitted, rank)
        self._places[request.uid] = place
        tenant = self._tenants.setdefault(request.tenant, _Tenant())
        tenant.agents.setdefault(request.agent_id, _Agent()).n_waiting += 1
        insort(tenant.arrivals, (request.number, place.arrived))
        self._line_up(place)
        self._sort(request)

    def remove(self, request: Request) -> None:
        self._leave(self._places[request.uid])

    def first(self, running: Sequence[Request]) -> Request:
        """Return the first request. The queue must not be empty."""
        return next(self._in_order(running)).request

    def take(
        self,
        running: Sequence[Request],
        admit: Callable[[Request], bool],
        may_run: Callable[[str], bool] = lambda _: True,
    ) -> Request | None:
        """Remove and return the first request that `admit` accepts, or None. Unless the request is
        preempted, `may_run` must accept its tenant."""
        tried: list[_Place] = []
        for place in islice(self._in_order(running), _MAX_TRIED):
            if place.rank != _PREEMPTED and not may_run(place.request.tenant):
                continue
            if admit(place.request):
                self._admitted += 1
                for earlier in tried:
                    self._pass(earlier)
                self._leave(place, served=self._admitted)
                return place.request
            if place.rank < _IN_ORDER:
                return None
            tried.append(place)
        return None

    # The next request of each agent, in order

    def _in_order(self, running: Sequence[Request]) -> Iterator[_Place]:
        """Yield requests in order, lazily. Callers must not change the queue."""
        agents = Counter((request.tenant, request.agent_id) for request in running)
        tenants = Counter(request.tenant for request in running)
        yield from (place for _, _, place in self._early)
        yield from self._of_idle_tenants(tenants)
        busy = [self._of_busy_tenant(name, n, agents) for name, n in tenants.items()]
        for *_, name, agent in heapq.merge(*busy):
            yield self._first_of(name, agent)

    def _of_idle_tenants(self, busy: Counter[str]) -> Iterator[_Place]:
        tenants = (entry for entry in self._order if entry[-1] not in busy)
        following = next(tenants, None)
        begun: list[tuple[_TenantEntry, int]] = []  # a heap of tenants and of their next agents
        while begun or following is not None:
            if following is not None and (not begun or following < begun[0][0]):
                heapq.heappush(begun, (following, 0))
                following = next(tenants, None)
                continue
            (since, *_, name), at = heapq.heappop(begun)
            order = self._tenants[name].order
            yield self._first_of(name, order[at][-1])
            if at + 1 < len(order):
                _, served, number, _ = order[at + 1]
                heapq.heappush(begun, ((since, served, number, name), at + 1))

    def _of_busy_tenant(
        self, name: str, n_running: int, agents: Counter[tuple[str, str]]
    ) -> Iterator[tuple[int, int, int, int, int, str, str]]:
        # In a key, the values to compare across tenants come before the names.
        tenant = self._tenants.get(name)
        if tenant is None:
            return
        idle = ((0, *entry) for entry in tenant.order if (name, entry[-1]) not in agents)
        busy = (
            (n, *agent.entry)
            for (owner, own_name), n in agents.items()
            if owner == name
            and (agent := tenant.agents.get(own_name)) is not None
            and agent.entry is not None
        )
        for n, _, served, number, agent_id in chain(idle, sorted(busy)):
            yield n_running, tenant.since, n, served, number, name, agent_id

    def _first_of(self, tenant: str, agent: str) -> _Place:
        return self._tenants[tenant].agents[agent].places[0]

    # Changes

    def _pass(self, place: _Place) -> None:
        place.passed += 1
        if place.passed >= _MAX_PASSED:
            self._step_out(place)
            place.rank = _PASSED
            self._line_up(place)
            self._sort(place.request)

    def _leave(self, place: _Place, served: int | None = None) -> None:
        request = place.request
        del self._places[request.uid]
        self._step_out(place)
        tenant = self._tenants[request.tenant]
        agent = tenant.agents[request.agent_id]
        agent.n_waiting -= 1
        del tenant.arrivals[bisect_left(tenant.arrivals, (request.number, place.arrived))]
        if served is not None:
            agent.served = tenant.served = served
        self._sort(request)
        if not agent.n_waiting:
            del tenant.agents[request.agent_id]
        if not tenant.agents:
            del self._tenants[request.tenant]

    def _line_up(self, place: _Place) -> None:
        request = place.request
        if place.rank < _IN_ORDER:
            insort(self._early, (place.rank, request.number, place), key=_without_place)
        else:
            agent = self._tenants[request.tenant].agents[request.agent_id]
            insort(agent.places, place, key=_turn)

    def _step_out(self, place: _Place) -> None:
        request = place.request
        if place.rank < _IN_ORDER:
            at = (place.rank, request.number)
            del self._early[bisect_left(self._early, at, key=_without_place)]
        else:
            places = self._tenants[request.tenant].agents[request.agent_id].places
            del places[bisect_left(places, place.turn, key=_turn)]

    def _sort(self, request: Request) -> None:
        name, tenant = request.tenant, self._tenants[request.tenant]
        agent = tenant.agents[request.agent_id]
        if agent.entry is not None:
            del tenant.order[bisect_left(tenant.order, agent.entry)]
        agent.entry = None
        if agent.places:
            place = agent.places[0]
            served = max(agent.served, place.arrived)
            turn = served - place.lead
            agent.entry = turn, served, place.request.number, request.agent_id
            insort(tenant.order, agent.entry)
        if tenant.entry is not None:
            del self._order[bisect_left(self._order, tenant.entry)]
        tenant.entry = None
        if tenant.order:
            _, served, number, _ = tenant.order[0]
            tenant.entry = tenant.since, served, number, name
            insort(self._order, tenant.entry)
