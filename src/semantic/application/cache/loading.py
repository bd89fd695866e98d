"""Restores prefixes: reads block bodies into a sequence's memory while other sequences decode.

The stepping thread provides the memory and takes the result; reading and verifying run in
threads of their own. Also decides whether reading from disk beats computing. Knows the store's
and the backend's ports; not requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from semantic.application.cache.prefix_lookup import StoredPrefix
from semantic.domain.block_hash import Part
from semantic.domain.errors import CacheReconstructionError
from semantic.domain.match import MatchEnd
from semantic.domain.stored import BlockHeader, BlockRead, Tier
from semantic.domain.value_objects import BLOCK_TOKENS, SequenceId
from semantic.ports.outbound import BatchBackend, Clock
from semantic.ports.store import CacheStorePort

_THREADS = 4
"""Concurrent loads; the store reads the bodies of each in parallel besides."""
_NEW_WEIGHT = 0.3
"""Weight of the newest measurement in the disk's average rate."""
_RETRY_AFTER = 8
"""A disk that was slower than computing is measured again after this many skipped reads."""


class BreakEven:
    """Compares the time to read a prefix from disk with the time to compute it.

    Both rates are measured while running.
    """

    def __init__(self, prefill_rate: Callable[[], float | None]) -> None:
        """`prefill_rate` is the measured prompt tokens per second, None before the first chunk."""
        self._prefill_rate = prefill_rate
        self._bytes_per_second: float | None = None
        self._skipped = 0

    @property
    def bytes_per_second(self) -> float | None:
        """The measured read rate, None before the first read."""
        return self._bytes_per_second

    def worth_reading(self, n_bytes: int, n_tokens: int) -> bool:
        """Whether reading `n_bytes` is expected to be faster than computing `n_tokens`."""
        rate = self._prefill_rate()
        if not n_bytes or rate is None or self._bytes_per_second is None:
            return True
        if n_bytes / self._bytes_per_second <= n_tokens / rate:
            self._skipped = 0
            return True
        self._skipped += 1
        if self._skipped < _RETRY_AFTER:
            return False
        self._skipped = 0
        return True

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Record a read of `n_bytes` that took `seconds`."""
        if not n_bytes or seconds <= 0:
            return
        measured = n_bytes / seconds
        old = self._bytes_per_second
        self._bytes_per_second = (
            measured if old is None else (1 - _NEW_WEIGHT) * old + _NEW_WEIGHT * measured
        )


@dataclass(frozen=True, slots=True)
class ReadBodies:
    """Result of reading: which bodies were verified, the checkpoint's bytes, and the seconds."""

    verified: tuple[bool, ...]
    checkpoint: bytes | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """A prefix that is being read into a sequence."""

    prefix: StoredPrefix
    sequence: SequenceId
    future: Future[ReadBodies]

    @property
    def done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many tokens the sequence holds after a load, and why not all that were expected."""

    length: int
    end: MatchEnd
    disk_bytes: int
    seconds: float


class Loader:
    """Loads prefixes from one store into sequences of one model."""

    def __init__(
        self, model: BatchBackend, store: CacheStorePort, clock: Clock = time.perf_counter
    ) -> None:
        self._model = model
        self._store = store
        self._clock = clock
        self._threads: Executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="load")

    def begin(self, prefix: StoredPrefix, sequence: SequenceId) -> Load:
        """Start to read `prefix` into `sequence`, which holds the tokens before `prefix.start`.

        Raises BackendError when there is no memory for it.
        """
        reads = self._reads(prefix.full, sequence, Part.FULL, prefix.start, prefix.length)
        if prefix.window:
            first = prefix.window[0].link.start
            reads += self._reads(prefix.window, sequence, Part.WINDOW, first, prefix.length)
        future = self._threads.submit(self._read, reads, prefix.checkpoint)
        return Load(prefix, sequence, future)

    def finish(self, load: Load) -> Loaded:
        """Give the sequence the verified blocks of a `load` that is done.

        A prefix with a checkpoint is restored whole or not at all. Raises BackendError.
        """
        read, prefix = load.future.result(), load.prefix
        n_good = next((i for i, good in enumerate(read.verified) if not good), len(read.verified))
        complete = n_good == len(read.verified) and (
            prefix.checkpoint is None or read.checkpoint is not None
        )
        if complete:
            length = prefix.length
        elif prefix.checkpoint is not None:
            length = prefix.start
        else:
            length = min(prefix.start + n_good * BLOCK_TOKENS, prefix.length)
        try:
            self._model.loaded(load.sequence, length, read.checkpoint if complete else None)
        except CacheReconstructionError:
            length, complete = prefix.start, False  # the tokens are computed instead
        end = prefix.end if complete else MatchEnd.DAMAGED
        return Loaded(length, end, prefix.bytes_in(Tier.DISK), read.seconds)

    def wait(self, loads: Iterable[Load], seconds: float) -> None:
        """Return when one of `loads` is done, or after `seconds`."""
        wait([load.future for load in loads], seconds, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """End the threads after the reads in progress."""
        self._threads.shutdown()

    def _reads(
        self,
        headers: tuple[BlockHeader, ...],
        sequence: SequenceId,
        part: Part,
        start: int,
        stop: int,
    ) -> list[BlockRead]:
        memory = self._model.loading(sequence, part, start, stop)
        return [BlockRead(*pair) for pair in zip(headers, memory, strict=True)]

    def _read(self, reads: list[BlockRead], checkpoint: BlockHeader | None) -> ReadBodies:
        started = self._clock()
        try:
            verified = tuple(self._store.read_into(reads))
            body = None
            if checkpoint is not None and all(verified):
                body = self._store.read(checkpoint)
        finally:
            # The backend writes in place only while no other reference to its arrays exists.
            for read in reads:
                for view in read.targets:
                    view.release()
        return ReadBodies(verified, body, self._clock() - started)
