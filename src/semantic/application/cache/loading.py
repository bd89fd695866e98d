"""Reads bodies into a sequence's memory while other sequences go on decoding.

The stepping thread hands out memory and takes the result; reading and verifying happen in
threads of their own. Knows the store and the backend's port; not requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
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
"""Loads at the same time; a store reads the bodies of each in parallel besides."""


@dataclass(frozen=True, slots=True)
class ReadBodies:
    """What came of reading: which bodies were proven, and how long it took."""

    proven: tuple[bool, ...]
    checkpoint: bytes | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """A prefix on its way into a sequence."""

    prefix: StoredPrefix
    sequence: SequenceId
    future: Future[ReadBodies]

    @property
    def done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many tokens the sequence holds now, and why not all that were expected."""

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
        """Read `prefix` into `sequence`, which holds the tokens before `prefix.start`.

        Raises BackendError when there is no memory for it.
        """
        reads = self._reads(prefix.full, sequence, Part.FULL, prefix.start, prefix.length)
        if prefix.window:
            first = prefix.window[0].link.start
            reads += self._reads(prefix.window, sequence, Part.WINDOW, first, prefix.length)
        future = self._threads.submit(self._read, reads, prefix.checkpoint)
        return Load(prefix, sequence, future)

    def finish(self, load: Load) -> Loaded:
        """Give the sequence what was proven; call it when `load` is done.

        A prefix that needs a checkpoint is all or nothing. Raises BackendError.
        """
        read, prefix = load.future.result(), load.prefix
        n_good = next((i for i, good in enumerate(read.proven) if not good), len(read.proven))
        complete = n_good == len(read.proven) and (
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
            length, complete = prefix.start, False  # then it is computed
        end = prefix.end if complete else MatchEnd.DAMAGED
        return Loaded(length, end, prefix.bytes_in(Tier.DISK), read.seconds)

    def wait(self, loads: Iterable[Load], seconds: float) -> None:
        """Return when one of `loads` is done, or after `seconds`."""
        wait([load.future for load in loads], seconds, return_when="FIRST_COMPLETED")

    def close(self) -> None:
        """End the threads when what they read is read."""
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
            proven = tuple(self._store.read_into(reads))
            body = None
            if checkpoint is not None and all(proven):
                body = self._store.read(checkpoint)
        finally:
            # The backend writes in place only while nobody else refers to its arrays.
            for read in reads:
                for view in read.targets:
                    view.release()
        return ReadBodies(proven, body, self._clock() - started)
