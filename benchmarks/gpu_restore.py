"""`python -m benchmarks.gpu_restore`: saving and restoring one long agent, on a GPU, tier by tier.

Computes a prompt with and without a store, then restores it from memory and from disk, alone and
beside others who decode, and reads the same files plainly. Prints JSON lines as it goes and writes
them to `--output DIR`. `--small` is a quick check on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module

from benchmarks import shapes
from experiments.harness.stats import percentile
from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.cuda.copies import transfers_here
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.store import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import TieredStore
from semantic.domain.value_objects import BLOCK_TOKENS, CompletedGeneration, KvBits, TokenEvent
from semantic.ports.store import StorePort
from tests.support.char_tokenizer import CharTokenizer

GIB = 1 << 30
READERS = 8
NEIGHBOURS, NEIGHBOUR_TOKENS = 7, 512
NEW = 20
CALM_STEPS = 60
_MS = 1e3


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured, and where its store is."""

    model: Module
    vocab: int
    tokens: int
    folder: Path
    kv_bits: KvBits = 16

    def prompt(self, number: int, n_tokens: int | None = None) -> list[int]:
        """Tokens that share no prefix with another number's."""
        n_tokens = n_tokens or self.tokens
        return [(number * 7919 + i * i * 31 + i) % (self.vocab - 1) for i in range(n_tokens)]


@dataclass
class Told:
    """The answer to one prompt: its first token's seconds, and the gaps of the others'."""

    ttft: float
    done: CompletedGeneration
    gaps: list[float] = field(default_factory=list)


class Side:
    """An engine of its own around the model."""

    def __init__(self, setup: Setup, store: StorePort | None) -> None:
        self.setup = setup
        self.backend: MLXBackend = wrap_model(setup.model, "benchmark", kv_bits=setup.kv_bits)
        spec = self.backend.cache_spec()
        needed = 3 * setup.tokens + NEIGHBOURS * 8 * NEIGHBOUR_TOKENS
        blocks = -(-needed // BLOCK_TOKENS)
        self.block_bytes = sum(layer.bytes_per_block for layer in spec.layers)
        pool: BlockPool = BlockPool(spec, max_bytes=blocks * self.block_bytes)
        self.engine = BlockPoolBatchEngine(
            self.backend, CharTokenizer(), pool, spec, store=store, max_batch=32
        )
        self._last: dict[str, float] = {}

    def neighbours(self) -> list[float]:
        """Let others decode; their gaps while nothing else happens, in seconds."""
        for i in range(NEIGHBOURS):
            tokens = self.setup.prompt(50 + i, NEIGHBOUR_TOKENS)
            self.engine.submit(f"neighbour-{i}", tokens, max_tokens=6 * NEIGHBOUR_TOKENS)
        gaps: list[float] = []
        while len(gaps) < NEIGHBOURS * CALM_STEPS:
            gaps += [gap for _, gap in self._step()]
        return gaps[len(gaps) // 2 :]

    def ask(self, agent: str, tokens: Sequence[int], max_tokens: int = 2) -> Told:
        """One prompt to its end; the gaps are those of all other streams."""
        begin = time.perf_counter()
        uid = self.engine.submit(agent, tokens, max_tokens=max_tokens)
        ttft: float | None = None
        gaps: list[float] = []
        while True:
            for event in self.engine.step_once():
                now = time.perf_counter()
                if isinstance(event, TokenEvent) and event.uid != uid:
                    gaps.append(now - self._last.get(event.uid, now))
                    self._last[event.uid] = now
                elif isinstance(event, TokenEvent) and ttft is None:
                    ttft = now - begin
                elif isinstance(event, CompletedGeneration) and event.uid == uid:
                    return Told(ttft or now - begin, event, gaps)

    def close(self, *, keep_store: bool = False) -> None:
        """End the engine and free its pages."""
        self.engine.close(keep_store=keep_store)
        self.backend.abandon()
        gc.collect()
        mx.clear_cache()

    def _step(self) -> Iterator[tuple[str, float]]:
        for event in self.engine.step_once():
            now = time.perf_counter()
            if isinstance(event, TokenEvent):
                before = self._last.get(event.uid)
                self._last[event.uid] = now
                if before is not None:
                    yield event.uid, now - before


def open_tiers(folder: Path) -> TieredStore:
    """A store as the server has one: memory, a queue, disk."""
    disk = DiskStore.open(folder, 64 * GIB)
    return TieredStore(MemoryStore(24 * GIB, secret=disk.secret), BackgroundStore(disk, 12 * GIB))


class Lines:
    """Prints and keeps lines: a rented machine may go away."""

    def __init__(self, output: Path) -> None:
        self._path = output / "gpu_restore.json"
        self._lines: list[dict[str, object]] = []
        output.mkdir(parents=True, exist_ok=True)

    def note(self, what: str, **found: object) -> None:
        """One result."""
        line = {"what": what, **found}
        self._lines.append(line)
        print(json.dumps(line), flush=True)
        self._path.write_text(json.dumps(self._lines, indent=1) + "\n", encoding="utf-8")


def cold(setup: Setup, lines: Lines) -> float:
    """The prompt computed without a store, after another of the same shape."""
    side = Side(setup, None)
    moved = transfers_here() is not None
    lines.note(
        "form", pages=side.backend.in_pages, beside_mlx=moved, block_mb=side.block_bytes / 1e6
    )
    side.ask("warm", setup.prompt(1))
    short = side.ask("short", setup.prompt(2, setup.tokens // 4)).ttft
    told = side.ask("cold", setup.prompt(3))
    side.close()
    rate = setup.tokens / told.ttft
    lines.note("cold, no store", ttft_s=told.ttft, tok_s=rate, short_tok_s=setup.tokens / 4 / short)
    return told.ttft


def saved(setup: Setup, store: TieredStore, lines: Lines, without: float) -> None:
    """The same with a store: first into fresh memory, then into memory that was used before."""
    side = Side(setup, store)
    short = setup.tokens // 4
    first = side.ask("short", setup.prompt(1, short)).ttft
    lines.note("short, with store, fresh memory", tokens=short, ttft_s=first, tok_s=short / first)
    prompt = setup.prompt(0)
    told = side.ask("ann", prompt)
    begin = time.perf_counter()
    side.engine.flush()
    flushed = time.perf_counter() - begin
    n_bytes = setup.tokens // BLOCK_TOKENS * side.block_bytes
    lines.note(
        "cold, with store", ttft_s=told.ttft, tok_s=setup.tokens / told.ttft,
        of_without=without / told.ttft, saved_gb=n_bytes / 1e9, flushed_s=flushed,
    )  # fmt: skip
    tokens = prompt
    for _ in range(4):
        tokens = [*tokens, *said(told), *setup.prompt(9, NEW)]
        told = side.ask("ann", tokens)
        lines.note(f"resident, {NEW} new", ttft_ms=_MS * told.ttft, cached=told.done.cached_tokens)
    for number in (5, 6):
        again = side.ask("short", setup.prompt(number, short))
        lines.note("short, with store, again", ttft_s=again.ttft, tok_s=short / again.ttft)
    for number in (1, 1):
        again = side.ask("short", [*setup.prompt(number, short), *setup.prompt(7, NEW)])
        lines.note("resident, short", ttft_ms=_MS * again.ttft, cached=again.done.cached_tokens)
    side.close(keep_store=True)


def said(told: Told) -> list[int]:
    """The tokens of an answer."""
    return list(told.done.tokens)


def restored(setup: Setup, store: StorePort, tier: str, lines: Lines, without: float) -> None:
    """The agent restored into an empty pool, twice, and beside others."""
    for number in range(2):
        side = Side(setup, store)
        told = side.ask("ann", [*setup.prompt(0), *setup.prompt(20 + number, NEW)])
        report(f"restore from {tier}", side, told, lines, without)
        side.close(keep_store=True)
    side = Side(setup, store)
    calm = side.neighbours()
    told = side.ask("ann", [*setup.prompt(0), *setup.prompt(30, NEW)])
    report(
        f"restore from {tier} beside {NEIGHBOURS}", side, told, lines, without,
        calm_p50_ms=_MS * percentile(calm, 50), calm_max_ms=_MS * max(calm),
        gap_p50_ms=_MS * percentile(told.gaps, 50), gap_p99_ms=_MS * percentile(told.gaps, 99),
        gap_max_ms=_MS * max(told.gaps),
    )  # fmt: skip
    side.close(keep_store=True)


def report(what: str, side: Side, told: Told, lines: Lines, without: float, **more: float) -> None:
    """One restore."""
    n_bytes = told.done.cached_tokens // BLOCK_TOKENS * side.block_bytes
    match = told.done.match
    lines.note(
        what, ttft_s=told.ttft, gb_s=n_bytes / told.ttft / 1e9, cached=told.done.cached_tokens,
        of_cold=told.ttft / without, end=None if match is None else str(match.end),
        tiers={str(tier): n for tier, n in side.engine.restored_bytes.items()}, **more,
    )  # fmt: skip


def plain(folder: Path, lines: Lines) -> None:
    """All block files read by several threads into memory that is used again."""
    files = list((folder / "blocks").rglob("*.full"))
    largest = max(path.stat().st_size for path in files)
    local = ThreadPoolExecutor(READERS)
    buffers: dict[int, memoryview] = {}

    def read(path: Path) -> int:
        number = threading.get_ident()
        if number not in buffers:
            buffers[number] = memoryview(bytearray(largest))
        fd = os.open(path, os.O_RDONLY)
        try:
            return os.preadv(fd, [buffers[number]], 0)
        finally:
            os.close(fd)

    for _ in range(3):
        begin = time.perf_counter()
        n_bytes = sum(local.map(read, files))
        seconds = time.perf_counter() - begin
        lines.note(
            f"plain read by {READERS} threads", gb_s=n_bytes / seconds / 1e9, gb=n_bytes / 1e9
        )
    local.shutdown()


@contextmanager
def store_folder(parent: Path | None) -> Iterator[Path]:
    """An empty folder for a store, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="semantic-restore-", dir=parent))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    parser.add_argument("--folder", type=Path, help="where the store's folder is made")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    model = shapes.small() if given.small else shapes.llama_8b(given.layers)
    vocab = 2048 if given.small else shapes.LLAMA_VOCAB
    lines = Lines(given.output)
    with store_folder(given.folder) as folder:
        tokens = min(given.tokens, 4096) if given.small else given.tokens
        setup = Setup(model, vocab, tokens, folder)
        without = cold(setup, lines)
        store = open_tiers(folder)
        saved(setup, store, lines, without)
        restored(setup, store, "memory", lines, without)
        store.close()
        reopened = open_tiers(folder)
        restored(setup, reopened, "disk", lines, without)
        plain(folder, lines)
        reopened.close()


if __name__ == "__main__":
    main()
