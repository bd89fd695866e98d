"""Restores prefixes: reads block bodies into a sequence's memory while other sequences decode.

The stepping thread says where they go and takes the result; reading, verifying and copying run in
threads of their own, and end when computing overtakes them. Knows the store's and the backend's
ports; not requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise

from semantic.application.cache.break_even import FEWEST_AT_ONCE, NEVER_GIVEN_UP, Terms
from semantic.application.cache.prefix_lookup import StoredPrefix
from semantic.domain.block_hash import BlockKey, Part
from semantic.domain.errors import CacheReconstructionError
from semantic.domain.match import MatchEnd
from semantic.domain.stored import BlockHeader, BlockRead, Tier
from semantic.domain.value_objects import BLOCK_TOKENS, SequenceId
from semantic.ports.generation import BatchBackend, BodyTarget, Clock
from semantic.ports.store import CacheStorePort

Target = tuple[BlockHeader, BodyTarget]
"""A body, and where it goes."""

_THREADS = 4
"""Concurrent loads; the store reads the bodies of each in parallel besides."""
_GROUP_BYTES = 256 << 20
"""Bytes that a load reads before they are copied to where they stay: the memory that it needs."""


@dataclass(frozen=True, slots=True)
class ReadBodies:
    """Result of reading: how many bodies were verified before the first that was not, the
    checkpoint's bytes, in how many groups and seconds, and whether it was given up because
    computing the rest is faster."""

    n_verified: int
    checkpoint: bytes | None
    n_groups: int
    seconds: float
    overtaken: bool


@dataclass(frozen=True, slots=True)
class Load:
    """A prefix that is being read into a sequence on `terms`; it took `seconds` to begin."""

    prefix: StoredPrefix
    terms: Terms
    sequence: SequenceId
    seconds: float
    future: Future[ReadBodies]
    given_up: threading.Event

    @property
    def done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many tokens the sequence holds after a load, why not all that were expected, and the
    seconds that it took: to begin, to read and to finish, without what it waited for others.

    `bytes_by_tier` were read, in `n_reads` reads one after the other.
    """

    length: int
    end: MatchEnd
    seconds: float
    bytes_by_tier: Mapping[Tier, int]
    n_reads: int


class Loader:
    """Loads prefixes from one store into sequences of one model."""

    def __init__(
        self, model: BatchBackend, store: CacheStorePort, clock: Clock = time.perf_counter
    ) -> None:
        self._model = model
        self._layout = model.layout()
        self._store = store
        self._clock = clock
        self._group_bytes = _GROUP_BYTES
        self._threads: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="load")
        self._loads = 0  # in progress, guarded by `_ended`
        self._ended = threading.Condition()

    def keep_within(self, n_bytes: int) -> None:
        """Have at most so many bytes read, by all loads together, that are not copied."""
        self._group_bytes = min(_GROUP_BYTES, n_bytes // _THREADS)

    def begin(
        self, prefix: StoredPrefix, sequence: SequenceId, terms: Terms = NEVER_GIVEN_UP
    ) -> Load:
        """Start to read `prefix` into `sequence`, which holds the tokens before `prefix.start`.

        It is given up when computing the rest is faster. Raises BackendError when there is no
        memory for it.
        """
        started = self._clock()
        targets = self._targets(prefix.full, sequence, Part.FULL, prefix.start, prefix.length)
        if prefix.window:
            first = prefix.window[0].link.start
            targets += self._targets(prefix.window, sequence, Part.WINDOW, first, prefix.length)
        size = max(FEWEST_AT_ONCE, self._group_bytes * len(targets) // max(1, prefix.n_bytes))
        ends = [0, *group_ends(terms.first, size, len(targets))]
        groups = [targets[start:stop] for start, stop in pairwise(ends)]
        given_up = threading.Event()
        with self._ended:
            self._loads += 1
        future = self._threads.submit(self._read, groups, prefix.checkpoint, terms, given_up)
        future.add_done_callback(self._count_down)
        return Load(prefix, terms, sequence, self._clock() - started, future, given_up)

    def finish(self, load: Load) -> Loaded:
        """Give the sequence the verified blocks of a `load` that is done.

        A prefix with a checkpoint is restored whole or not at all. Raises BackendError.
        """
        read, prefix = load.future.result(), load.prefix
        started = self._clock()
        n_bodies = len(prefix.full) + len(prefix.window)
        complete = read.n_verified == n_bodies and (
            prefix.checkpoint is None or read.checkpoint is not None
        )
        if complete:
            length = prefix.length
        elif prefix.checkpoint is not None:
            length = prefix.start
        else:
            length = min(prefix.start + read.n_verified * BLOCK_TOKENS, prefix.length)
        try:
            self._model.loaded(load.sequence, length, read.checkpoint if complete else None)
        except CacheReconstructionError:
            length, complete = prefix.start, False  # the tokens are computed instead
        end = prefix.end if complete else MatchEnd.DAMAGED
        # The one that was not verified took its time, too.
        n_read = len(prefix.headers) if complete else read.n_verified + 1
        if read.overtaken:
            end, n_read = MatchEnd.SLOWER, read.n_verified
        seconds = load.seconds + read.seconds + self._clock() - started
        n_bytes = prefix.bytes_of(prefix.headers[:n_read])
        return Loaded(length, end, seconds, n_bytes, max(1, read.n_groups))

    def give_up(self, load: Load) -> None:
        """The sequence is being closed: read no more than what has begun."""
        load.given_up.set()

    def wait(self, loads: Iterable[Load], seconds: float) -> None:
        """Return when one of `loads` is done, or after `seconds`."""
        wait([load.future for load in loads], seconds, return_when="FIRST_COMPLETED")

    def wait_until_idle(self, seconds: float) -> bool:
        """Return when no load is in progress, or after `seconds`; whether none is. Thread-safe."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._loads, seconds)

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._threads.shutdown()

    def _count_down(self, _: object) -> None:
        with self._ended:
            self._loads -= 1
            self._ended.notify_all()

    def _targets(
        self,
        headers: tuple[BlockHeader, ...],
        sequence: SequenceId,
        part: Part,
        start: int,
        stop: int,
    ) -> list[Target]:
        return list(zip(headers, self._model.loading(sequence, part, start, stop), strict=True))

    def _read(
        self,
        groups: list[list[Target]],
        checkpoint: BlockHeader | None,
        terms: Terms,
        given_up: threading.Event,
    ) -> ReadBodies:
        started = self._clock()
        n_bodies, n_groups = sum(map(len, groups)), len(groups)
        n_verified, complete, overtaken = 0, True, False
        try:
            while groups and complete and not overtaken and not given_up.is_set():
                verified = self._read_group(groups.pop(0))
                n_good = next((i for i, good in enumerate(verified) if not good), len(verified))
                n_verified += n_good
                complete = n_good == len(verified)
                overtaken = complete and terms.overtaken(
                    self._clock() - started, n_verified / n_bodies, divisible=checkpoint is None
                )
        finally:
            for group in groups:
                for _, target in group:
                    target.close()
        body = None
        if checkpoint is not None and complete and not overtaken and not given_up.is_set():
            body = self._store.read(checkpoint)
        seconds = self._clock() - started
        return ReadBodies(n_verified, body, n_groups - len(groups), seconds, overtaken)

    def _resident(self, headers: Sequence[BlockHeader]) -> dict[BlockKey, bytes | memoryview]:
        """The bodies that need no reading."""
        sizes = {
            header.key: self._layout.body_bytes(header.part, len(header.link.tokens))
            for header in headers
        }
        found = self._store.resident(headers)
        return {key: body for key, body in found.items() if len(body) == sizes[key]}

    def _read_group(self, group: list[Target]) -> list[bool]:
        """Read some bodies to where they stay; which of them were verified."""
        try:
            here = self._resident([header for header, _ in group])
            for header, target in group:
                if header.key in here:
                    target.put(here[header.key])
            rest = [(header, target) for header, target in group if header.key not in here]
            reads = [BlockRead(header, target.open()) for header, target in rest]
            verified = dict.fromkeys(here, True)
            for (header, target), good in zip(rest, self._store.read_into(reads), strict=True):
                target.close(len(header.link.tokens) if good else 0)
                verified[header.key] = good
        finally:
            for _, target in group:
                target.close()
        return [verified[header.key] for header, _ in group]


def group_ends(first: int, most: int, n_bodies: int) -> Iterator[int]:
    """Where groups of bodies end: `first` ones, then as many as all before, at most `most`."""
    stop = 0
    while stop < n_bodies:
        stop = min(n_bodies, stop + min(most, max(first, stop)))
        yield stop
