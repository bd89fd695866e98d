"""Which request computes its prompt next, and which is preempted.

Decided by the requests' state and what their agents were given; no pool, no backend, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from semantic.application.request import Request

_LONGEST_WAITING_EVERY = 4
"""One chunk in this many goes to the agent that waits longest for one, if that one has been
passed over as often, so that a stream of short prompts cannot starve a long one."""


class PrefillTurns:
    """Gives the chunks of prefill to agents.

    The next chunk is the one's whose agent will have had the least when its prompt is computed:
    a short prompt does not wait for a long one, and who sends many short ones has them counted
    together. An agent that has nothing left to compute is forgotten.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._given: dict[str, int] = {}  # tokens
        self._waits_since: dict[str, int] = {}  # turns
        self._last_turn: dict[int, int] = {}  # of each request, or when it came

    def next(self, requests: Sequence[Request]) -> Request | None:
        """Whose prompt is to get the next chunk; None when there is nobody."""
        owners = {request.number: request.owner for request in requests}
        here = set(owners.values())
        self._given = {owner: self._given.get(owner, 0) for owner in here}
        self._waits_since = {owner: self._waits_since.get(owner, self._turn) for owner in here}
        self._last_turn = {number: self._last_turn.get(number, self._turn) for number in owners}

        def longest_waiting(request: Request) -> tuple[int, int]:
            return self._waits_since[owners[request.number]], request.number

        def least_given(request: Request) -> tuple[int, int]:
            return self._given[owners[request.number]] + request.to_prefill, request.number

        oldest = min(requests, key=longest_waiting, default=None)
        if oldest is not None and (self._turn + 1) % _LONGEST_WAITING_EVERY == 0:
            passed_over = self._turn - self._last_turn[oldest.number]
            if passed_over >= _LONGEST_WAITING_EVERY - 1:
                return oldest
        return min(requests, key=least_given, default=None)

    def give(self, request: Request, n_tokens: int) -> None:
        """`request` has had its turn and computed `n_tokens`."""
        self._turn += 1
        self._given[request.owner] = self._given.get(request.owner, 0) + n_tokens
        self._waits_since[request.owner] = self._last_turn[request.number] = self._turn


def preemption_victim(requests: Sequence[Request]) -> Request | None:
    """The request to preempt when the pool runs dry: the last to arrive has the least to lose,
    and the oldest always goes on, so every request ends."""
    return max(requests, key=lambda request: request.number, default=None)
