"""Restoring an agent's blocks from disk into a sequence, beside reading the same bytes only."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from benchmarks import stored
from benchmarks.rig import Rig
from benchmarks.shapes import smollm2_135m
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.stores.disk.block_file import HEADER_BYTES
from semantic.adapters.stores.disk.store import DiskStore
from semantic.application.cache.loading import Loader
from semantic.application.cache.prefix_lookup import PrefixLookup, StoredPrefix
from semantic.domain.block_hash import Scope, namespace_of, tenant_tag
from semantic.domain.value_objects import SequenceId, whole_blocks

QUESTION = "How fast does an agent of 2,000 tokens come from disk, and what does the proof cost?"
CRITERION = (
    "page cache warm, memory touched before: at least 0.5 x the bytes per second of a plain "
    "parallel read of the same bytes, and the bodies' checksums take less than 15 % of the time"
)
LEAST_RATIO, MOST_SHARE = 0.5, 0.15
LENGTH, ROUNDS = 2000, 60
THREADS = min(8, (os.cpu_count() or 1) + 2)
"""Reader threads, as many as the disk store's."""
PLAIN, PROVEN, BELIEVED = "plain read", "restore", "restore, body not proven"


@dataclass(frozen=True, slots=True)
class Stored:
    """The blocks to read: as a prefix for the loader, and as files for the plain read."""

    prefix: StoredPrefix
    files: tuple[Path, ...]
    n_bytes: int


def run() -> Result:
    """All ways in turns, into touched memory and into new memory."""
    started = Run.start(
        "restore",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={"tokens": LENGTH, "rounds": ROUNDS, "threads": THREADS},
        seed=0,
    )
    rig = Rig.build(smollm2_135m(), model_id=stored.MODEL_ID)
    with stored.folder() as folder:
        tokens = save(rig, folder)
        store = DiskStore.open(folder, stored.ROOM)
        restorer = Restorer(rig.backend, store, find(rig.backend, store, folder, tokens))
        samples = list(restorer.measure())
        n_bytes = restorer.stored.n_bytes
        restorer.close()
    table = [row(way, memory, samples, n_bytes) for memory in MEMORIES for way in WAYS]
    ratio = float(str(table[1]["of_plain"]))
    share = proof(samples, "touched")
    summary: dict[str, Json] = {
        "ways": [{**line} for line in table],
        "mb": round(n_bytes / 1e6, 1),
        "ratio": round(ratio, 2),
        "proof_percent": round(100 * share, 1),
        "proof_percent_new_memory": round(100 * proof(samples, "new"), 1),
    }
    passed = ratio >= LEAST_RATIO and share < MOST_SHARE
    return started.finish(samples, summary, Verdict(CRITERION, LEAST_RATIO, ratio, passed=passed))


def save(rig: Rig, folder: Path) -> tuple[int, ...]:
    """Leave the agent in a store, closed again."""
    writer = Rig.build(
        rig.backend.model, store=DiskStore.open(folder, stored.ROOM), model_id=stored.MODEL_ID
    )
    tokens = stored.save_agent(writer, "ann", LENGTH)
    writer.engine.close()
    return tokens


def find(backend: MLXBackend, store: DiskStore, folder: Path, tokens: tuple[int, ...]) -> Stored:
    """The agent's blocks as the engine finds them."""
    layout = backend.layout()
    namespace = namespace_of(backend.model_id, layout.name)
    scope = Scope(namespace, tenant_tag(store.secret, ""))
    links = [link for link in scope.chain(tokens) if link.is_full]
    prefix = PrefixLookup(store, layout).find(scope, links, tokens)
    if prefix is None or prefix.length != LENGTH:
        raise AssertionError(f"expected {LENGTH} tokens in the store, got {prefix}")
    names = [f"{header.link.hash.hex()}.{header.part.value}" for header in prefix.headers]
    files = tuple(folder / "blocks" / name[:2] / name for name in names)
    return Stored(prefix, files, sum(file.stat().st_size - HEADER_BYTES for file in files))


class Restorer:
    """Reads the same blocks again and again."""

    def __init__(self, backend: MLXBackend, store: DiskStore, stored: Stored) -> None:
        self.stored = stored
        self._backend = backend
        self._store = store
        self._loader = Loader(backend, store)
        self._threads = ThreadPoolExecutor(THREADS)

    def measure(self) -> Iterator[dict[str, Scalar]]:
        """Milliseconds of every way in every round; the first round does not count."""
        for i in range(ROUNDS + 1):
            for memory in MEMORIES:
                for way in WAYS if i % 2 else reversed(WAYS):
                    mx.clear_cache()  # what was freed would come back already touched
                    ms = 1e3 * WAYS[way](self, touched=memory == "touched")
                    if i:
                        yield {"memory": memory, "way": way, "ms": ms}

    def plain(self, *, touched: bool) -> float:
        """Seconds to read all bodies into one buffer, usually one call per file."""
        begin = time.perf_counter()
        memory = bytearray(self.stored.n_bytes)  # pages come when they are written to
        if touched:
            memory[:: os.sysconf("SC_PAGE_SIZE")] = bytes(
                len(range(0, len(memory), os.sysconf("SC_PAGE_SIZE")))
            )
            begin = time.perf_counter()
        view, at = memoryview(memory), 0
        targets = []
        for file in self.stored.files:
            size = file.stat().st_size - HEADER_BYTES
            targets.append(view[at : at + size])
            at += size
        list(self._threads.map(read_body, self.stored.files, targets))
        return time.perf_counter() - begin

    def proven(self, *, touched: bool) -> float:
        """Seconds of the engine's own way: loader and disk store, every byte verified."""
        begin = time.perf_counter()
        sequence = self._backend.open(whole_blocks(LENGTH))
        if touched:
            mx.eval([cache.state for cache in self._backend.sequences()[-1]])
            begin = time.perf_counter()
        load = self._loader.begin(self.stored.prefix, sequence)
        self._loader.wait([load], 60)
        loaded = self._loader.finish(load)
        seconds = time.perf_counter() - begin
        self._require(sequence, loaded.length)
        return seconds

    def believed(self, *, touched: bool) -> float:
        """The same without checksums of bodies; headers are still verified."""
        with believing():
            return self.proven(touched=touched)

    def close(self) -> None:
        """End the threads and the store."""
        self._threads.shutdown()
        self._loader.close()
        self._store.close()

    def _require(self, sequence: SequenceId, length: int) -> None:
        self._backend.close(sequence)
        if length != LENGTH:
            raise AssertionError(f"{length} tokens were restored, expected {LENGTH}")


WAYS: dict[str, Callable[..., float]] = {
    PLAIN: Restorer.plain,
    PROVEN: Restorer.proven,
    BELIEVED: Restorer.believed,
}
MEMORIES = ("touched", "new")


def read_body(file: Path, target: memoryview) -> None:
    """Fill `target` with the body of a block file."""
    fd = os.open(file, os.O_RDONLY)
    try:
        at = HEADER_BYTES
        while target:
            got = os.preadv(fd, [target], at)
            at, target = at + got, target[got:]
    finally:
        os.close(fd)


class _Believed(bytes):
    """A checksum that equals every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


class _NoHash:
    """Replaces the hash of a body; ignores its input."""

    def update(self, data: memoryview) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """Equal for any body."""
        return _Believed()


@contextmanager
def believing() -> Iterator[None]:
    """Bodies are not verified meanwhile. The product has no setting for this."""
    with mock.patch("xxhash.xxh3_128", _NoHash):
        yield


def row(way: str, memory: str, samples: list[dict[str, Scalar]], n_bytes: int) -> dict[str, Scalar]:
    """One line of the table."""
    ms = statistics.median(times(samples, way, memory))
    return {
        "way": way,
        "memory": memory,
        "ms": round(ms, 1),
        "gb_per_s": round(n_bytes / ms / 1e6, 2),
        "of_plain": round(paired(samples, way, memory), 3),
    }


def proof(samples: list[dict[str, Scalar]], memory: str) -> float:
    """Part of the restore's time that the body's checksum takes, median over the rounds."""
    pairs = zip(times(samples, BELIEVED, memory), times(samples, PROVEN, memory), strict=True)
    return statistics.median(1 - without / proven for without, proven in pairs)


def paired(samples: list[dict[str, Scalar]], way: str, memory: str) -> float:
    """Median over the rounds of the plain read's time over this way's."""
    plain = times(samples, PLAIN, memory)
    return statistics.median(a / b for a, b in zip(plain, times(samples, way, memory), strict=True))


def times(samples: list[dict[str, Scalar]], way: str, memory: str) -> list[float]:
    """Milliseconds, round by round."""
    return [float(str(s["ms"])) for s in samples if (s["way"], s["memory"]) == (way, memory)]
