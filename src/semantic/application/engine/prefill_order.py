"""The order in which prompts receive chunks of prefill.

Knows requests, their tenants and priorities; not how many tokens a chunk has or what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.application.request import Request

_LONGEST_WAITING_EVERY = 4
"""One chunk in this many goes to the request that has waited longest, if all others since its last
went elsewhere: a stream of short prompts cannot starve a long one."""


class PrefillOrder:
    """The order in which prompts receive chunks.

    The next chunk goes to the request whose agent will have computed the fewest tokens once this
    prompt is complete: a short prompt does not wait for a long one, and an agent's many short
    prompts are counted together. The count restarts for an agent that has no prompt ready. Of a
    tenant's prompts only those of the highest priority have turns, but for those of the one that
    has waited longest; of several tenants none gains by it.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._computed: dict[str, int] = {}  # tokens, by agent
        self._waits_since: dict[str, int] = {}  # turn, by agent
        self._last_turn: dict[int, int] = {}  # by request: of its last chunk, or of its arrival
        self._urgent: dict[int, tuple[int, int]] = {}  # by request: the order of one behind it
        self._priority: dict[int, int] = {}  # by request: its own, or of one of the tenant behind

    def next(
        self,
        requests: Sequence[Request],
        behind: Sequence[tuple[Request, Request | None]] = (),
    ) -> Request | None:
        """The request to prefill next of those that are ready; None if none is.

        Each request `behind` waits for another one. Counts and waits of agents and requests that
        are not ready are forgotten.
        """
        numbers = {request.number for request in requests}
        here = {request.owner for request in requests}
        self._computed = {owner: self._computed.get(owner, 0) for owner in here}
        self._waits_since = {owner: self._waits_since.get(owner, self._turn) for owner in here}
        self._last_turn = {number: self._last_turn.get(number, self._turn) for number in numbers}

        self._urgent = {}
        self._priority = {request.number: request.hints.priority for request in requests}
        for request, leader in behind:
            if leader is not None:
                self._inherit(leader, request)
                order = self._computed.get(request.owner, 0) + request.to_prefill, request.number
                before = self._urgent.get(leader.number, order)
                self._urgent[leader.number] = min(before, order)

        oldest = min(requests, key=self._longest_waiting, default=None)
        if oldest is not None and (self._turn + 1) % _LONGEST_WAITING_EVERY == 0:
            passed_over = self._turn - self._last_turn[oldest.number]
            if passed_over >= _LONGEST_WAITING_EVERY - 1:
                return oldest
        return min(self._first_of_tenants(requests), key=self._least_computed, default=None)

    def by_least_computed(self, requests: Sequence[Request]) -> list[Request]:
        """Some of the requests that the last `next` was given, in the order of their chunks."""
        return sorted(requests, key=self._least_computed)

    def account(self, request: Request, n_tokens: int, *, same_pass: bool = False) -> None:
        """Count a chunk of `n_tokens` for the request's agent; chunks of one pass are one turn."""
        self._turn += not same_pass
        self._computed[request.owner] = self._computed.get(request.owner, 0) + n_tokens
        self._waits_since[request.owner] = self._last_turn[request.number] = self._turn

    def _inherit(self, leader: Request, request: Request) -> None:
        """Give a `leader` the priority of a request of its tenant that waits for it."""
        own = self._priority.get(leader.number)
        if own is not None and leader.tenant == request.tenant:
            self._priority[leader.number] = max(own, request.hints.priority)

    def _first_of_tenants(self, requests: Sequence[Request]) -> list[Request]:
        """Those that none of their tenant's precedes by priority."""
        highest: dict[str, int] = {}
        for one in requests:
            own = self._priority[one.number]
            highest[one.tenant] = max(own, highest.get(one.tenant, own))
        return [one for one in requests if self._priority[one.number] == highest[one.tenant]]

    def _longest_waiting(self, request: Request) -> tuple[int, int]:
        return self._waits_since[request.owner], request.number

    def _least_computed(self, request: Request) -> tuple[int, int]:
        order = self._computed[request.owner] + request.to_prefill, request.number
        return min(order, self._urgent.get(request.number, order))
