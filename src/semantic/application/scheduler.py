"""Which request computes its prompt next.

A pure function of the requests' state: no pool, no backend, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from semantic.application.request import Request

KV = TypeVar("KV")

_OLDEST_EVERY = 4
"""One chunk in this many goes to the oldest prompt, so that a stream of short ones cannot
starve it."""


def next_to_prefill(requests: Sequence[Request[KV]], turn: int) -> Request[KV] | None:
    """The request whose prompt gets chunk number `turn`: the one with the least left to do, so
    that a short prompt does not wait for a long one; every fourth time the oldest."""
    if not requests:
        return None
    if turn % _OLDEST_EVERY == _OLDEST_EVERY - 1:
        return min(requests, key=lambda request: request.number)
    return min(requests, key=lambda request: (request.to_prefill, request.number))


def youngest(requests: Sequence[Request[KV]]) -> Request[KV] | None:
    """The request to suspend when the pool runs dry: the last to arrive has the least to lose,
    and the oldest always goes on, so every request ends."""
    return max(requests, key=lambda request: request.number, default=None)
