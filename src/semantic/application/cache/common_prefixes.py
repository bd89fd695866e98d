"""CommonPrefixes: which requests that have not ended begin with the same tokens, and how many.

Compares prompts of one tenant as they arrive. Knows requests; not what is cached of them.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from semantic.application.cache.checkpoint_plan import FEWEST_TOKENS
from semantic.application.request import Phase, Request

_MOST_COMPARED = 128
"""A prompt is compared with so many of those that begin like it: the running, then the oldest."""
_HEAD_BYTES = FEWEST_TOKENS * array("I").itemsize


@dataclass(slots=True)
class _Group:
    """The requests of one tenant that begin with the same `FEWEST_TOKENS` tokens.

    `version` changes when one is added or removed; `compared` are those to compare with, as of
    `compared_at`. `allowance`: bytes that checkpoints may take where they part.
    """

    allowance: int

    live: dict[str, _Live] = field(default_factory=dict)
    version: int = 0
    compared: list[_Live] = field(default_factory=list)
    compared_at: int = -1


@dataclass(slots=True)
class _Live:
    """A request that has not ended; `common` has its common prefixes, by the other's uid, and
    `longest` is the longest of them."""

    request: Request
    packed: bytes
    group: _Group
    common: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    compared_at: int = -1


class CommonPrefixes:
    """The requests of one engine that have not ended.

    `add` is called by any thread, all else by the stepping thread.
    """

    def __init__(self, allowance: int = 0) -> None:
        """`allowance`: bytes that requests that begin alike have from the beginning."""
        self._allowance = allowance
        self._live: dict[str, _Live] = {}
        self._groups: dict[tuple[str, bytes], _Group] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: Request) -> None:
        """Compare others with `request` from now on."""
        # The last token of a prompt is never taken from a cache.
        packed = array("I", request.prompt[:-1]).tobytes()
        if len(packed) < _HEAD_BYTES:
            return
        with self._lock:
            group = self._groups.setdefault(_head(request, packed), _Group(self._allowance))
            group.live[request.uid] = self._live[request.uid] = _Live(request, packed, group)
            group.version += 1

    def remove(self, request: Request) -> None:
        """The request has ended."""
        with self._lock:
            own = self._live.pop(request.uid, None)
            if own is None:
                return
            del own.group.live[request.uid]
            own.group.version += 1
            if not own.group.live:
                del self._groups[_head(request, own.packed)]

    def version(self, request: Request) -> int:
        """Changes with the requests that `of` returns."""
        own = self._live.get(request.uid)
        return -1 if own is None else own.group.version

    def allowance(self, request: Request) -> int:
        """Bytes that checkpoints may take where requests that begin like this one part."""
        own = self._live.get(request.uid)
        return 0 if own is None else own.group.allowance

    def allow(self, request: Request, n_bytes: int) -> None:
        """Add to the allowance, or with a negative number take from it."""
        own = self._live.get(request.uid)
        if own is not None:
            own.group.allowance += n_bytes

    def of(self, request: Request, at_least: int = FEWEST_TOKENS) -> Iterator[tuple[Request, int]]:
        """Requests of the same tenant and how many tokens they share: `at_least` or more."""
        own = self._live.get(request.uid)
        if own is None:
            return
        if own.compared_at != own.group.version:
            self._compare(own)
        if own.longest < at_least:
            return
        for uid, n_tokens in own.common.items():
            other = own.group.live.get(uid)
            if other is not None and n_tokens >= at_least:
                yield other.request, n_tokens

    def _compare(self, own: _Live) -> None:
        before = own.common
        own.compared_at, others = self._others(own.group)
        own.common = {
            other.request.uid: before.get(other.request.uid) or _n_common(own.packed, other.packed)
            for other in others
            if other is not own
        }
        own.longest = max(own.common.values(), default=0)

    def _others(self, group: _Group) -> tuple[int, list[_Live]]:
        """The requests of `group` to compare with, and its version."""
        with self._lock:
            if group.compared_at != group.version:
                live = sorted(group.live.values(), key=_is_waiting)
                group.compared, group.compared_at = live[:_MOST_COMPARED], group.version
            return group.compared_at, group.compared


def computes_before(left: Request, right: Request) -> bool:
    """Which of two requests computes what they share: one order for all, so that one always does.

    The one that has computed more; of two equals the one that ends sooner, then the older.
    """
    return _order(left) < _order(right)


def is_computing(request: Request) -> bool:
    """Whether the request's prompt is being computed and stops at checkpoints."""
    return request.phase is Phase.PREFILL and request.sequence is not None and not request.scoring


def _order(request: Request) -> tuple[int, int, int]:
    return -request.computed, request.to_prefill, request.number


def _is_waiting(live: _Live) -> bool:
    return live.request.phase is Phase.WAITING


def _head(request: Request, packed: bytes) -> tuple[str, bytes]:
    return request.tenant, packed[:_HEAD_BYTES]


def _n_common(left: bytes, right: bytes) -> int:
    """Tokens in common of two packed prompts."""
    size = array("I").itemsize
    same, stop = 0, min(len(left), len(right))
    while same < stop:
        middle = (same + stop + 1) // 2
        if left[same:middle] == right[same:middle]:
            same = middle
        else:
            stop = middle - 1
    return same // size
