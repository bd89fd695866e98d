"""What one agent costs when 10, 100, 1,000 or 20,000 others are saved, five blocks each.

A store is filled with its own files. Then, with an engine of the small model around it: a
submission, the turn of a new agent, a page of `GET /v1/agents`, `semantic agents ls`, opening the
store, an eviction when the quota is full, and resident memory. Run alone with other numbers:
python -m benchmarks.growth 10 1000
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks import footprint, stored
from experiments.harness.document import Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic import BlockPool, BlockPoolBatchEngine, load
from semantic.adapters.exchange.archive import AgentArchives
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.disk.block_file import encode_header
from semantic.adapters.stores.disk.entries import Entry, block_entry, manifest_entry
from semantic.adapters.stores.disk.manifest_file import FiledManifest, encode_manifest
from semantic.adapters.stores.disk.store import DiskStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import TieredStore
from semantic.application.agents.directory import AgentDirectory
from semantic.application.agents.finder import AgentFinder
from semantic.application.agents.served_agents import AgentTransfers, ServedAgents
from semantic.application.fair_threads import FairThreads
from semantic.domain.block_hash import Part, Scope, namespace_of, tenant_tag
from semantic.domain.entities import AgentBlocks
from semantic.domain.stored import BlockHeader, Manifest, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS, CacheKey, whole_blocks

T = TypeVar("T")
Row = dict[str, Scalar]

QUESTION = "What does one agent cost when 20,000 others exist?"
CRITERION = (
    "with 20,000 agents and 100,000 blocks: a submission at most 0.3 ms, a new agent's turn within "
    "5 % of that with 10, a page of the list at most 20 ms, opening at most 1 s longer than empty"
)
SIZES = (10, 100, 1000, 20_000)
BLOCKS, OWN_TOKENS, SHARED_BLOCKS = 5, 30, 1
POOL_AGENTS = 500
"""Idle agents in the pool, at most."""
BODY = bytes(64)
REPEATS, PAGE = 30, 20
MOST_SUBMIT_MS, MOST_PAGE_MS, MOST_OPEN_MS, MOST_TURN = 0.3, 20.0, 1000.0, 1.05
WARM_BYTES = 256 << 20


class Engine:
    """An engine around a store, called as if it had a thread of its own."""

    def __init__(self, model: MLXBackend, tokenizer: MLXTokenizer, disk: DiskStore) -> None:
        self.store = TieredStore(
            MemoryStore(WARM_BYTES, secret=disk.secret), BackgroundStore(disk, WARM_BYTES)
        )
        spec = model.cache_spec()
        self.pool = BlockPool(spec, max_bytes=1 << 40)
        self.model = model
        self.engine = BlockPoolBatchEngine(model, tokenizer, self.pool, spec, store=self.store)
        directory = AgentDirectory(self.store, disk, namespace(model), "semantic-tiny")
        finder = AgentFinder(partial(tenant_tag, self.store.secret))
        archives = AgentArchives(
            self.store,
            disk,
            namespace(model),
            model.layout(),
            folder=None,
            model="semantic-tiny",
            model_name="semantic-tiny",
        )
        transfers = AgentTransfers(self, directory, archives, {})
        self.agents = ServedAgents(self, directory, finder, FairThreads(2, "growth"), transfers)

    def call(self, function: Callable[[BlockPoolBatchEngine], T]) -> Future[T]:
        """See `EngineCalls.call`."""
        done: Future[T] = Future()
        done.set_result(function(self.engine))
        return done

    def add_idle(self, n: int) -> None:
        """Idle caches without data: the pool counts them."""
        for number in range(n):
            name = f"agent-{number}"
            cache = AgentBlocks(name, token_ids=(1,) * OWN_TOKENS, model_id=self.model.model_id)
            counts = self.pool.spec.blocks_for(whole_blocks(OWN_TOKENS))
            for layer in self.pool.allocate_layers(counts, name):
                for block in layer:
                    block.token_count = OWN_TOKENS
                    cache.add_block(block)
            self.engine.idle_caches.put(CacheKey(self.model.model_id, name), cache)

    def submission(self, number: int) -> float:
        """Milliseconds of one submission; it is cancelled afterwards."""
        prompt = [7 + (number * 31 + i * i) % 90 for i in range(OWN_TOKENS)]
        begin = time.perf_counter()
        uid = self.engine.submit(f"new-{number}", prompt, max_tokens=4)
        taken = 1e3 * (time.perf_counter() - begin)
        self.engine.cancel(uid)
        for _ in self.engine.step():
            pass
        return taken

    def turn(self, number: int) -> float:
        """Milliseconds of a new agent's whole turn."""
        prompt = [9 + (number * 17 + i * i) % 90 for i in range(OWN_TOKENS)]
        begin = time.perf_counter()
        self.engine.submit(f"turn-{number}", prompt, max_tokens=16)
        for _ in self.engine.step():
            pass
        return 1e3 * (time.perf_counter() - begin)

    def page(self) -> float:
        """Milliseconds of a page of the list."""
        begin = time.perf_counter()
        found = asyncio.run(self.agents.page("", PAGE))
        taken = 1e3 * (time.perf_counter() - begin)
        if not found.agents:
            raise AssertionError("no agents")
        return taken


def namespace(model: MLXBackend) -> bytes:
    """The namespace of the model's blocks."""
    return namespace_of(model.model_id, model.layout().name)


def fill(folder: Path, model: MLXBackend, n: int, n_blocks: int = BLOCKS) -> None:
    """Save `n` agents of so many blocks: the first shared by all, the last partial.

    Writes the files as the store does, without its transactions, and lets it make the index.
    """
    disk = DiskStore.open(folder, stored.ROOM)
    scope = Scope(namespace(model), tenant_tag(disk.secret, ""))
    disk.close()
    layout = model.layout().name
    shared = tuple(range(SHARED_BLOCKS * BLOCK_TOKENS))
    written: set[str] = set()
    for number in range(n):
        middle = (number,) * ((n_blocks - SHARED_BLOCKS - 1) * BLOCK_TOKENS)
        tokens = (*shared, *middle, *range(OWN_TOKENS))
        for link in scope.chain(tokens):
            block = StoredBlock(BlockHeader(link, Part.FULL, layout), BODY)
            entry = block_entry(block.header.key)
            if entry.name not in written:
                write(folder, entry, encode_header(block) + BODY)
                written.add(entry.name)
        manifest = Manifest(
            scope, f"agent-{number}", tokens, 1, model="tiny", saved_at=float(number)
        )
        filed = FiledManifest(manifest, number + 1)
        write(folder, manifest_entry(filed.key, 1), encode_manifest(filed))
    DiskStore.open(folder, stored.ROOM).close()


def write(folder: Path, entry: Entry, data: bytes) -> None:
    """Write a file of the store."""
    path = folder / str(entry)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)


def measure(folder: Path, n: int) -> Row:
    """One row of the curve."""
    model, tokenizer = load()
    begin = time.perf_counter()
    fill(folder, model, n)
    filled = time.perf_counter() - begin
    before = footprint.resident_bytes()
    begin = time.perf_counter()
    disk = DiskStore.open(folder, stored.ROOM)
    opened = 1e3 * (time.perf_counter() - begin)
    of = Engine(model, tokenizer, disk)
    of.add_idle(min(n, POOL_AGENTS))
    gc.collect()
    resident = footprint.resident_bytes() - before
    for warm in range(3):
        of.submission(-1 - warm)
        of.turn(-1 - warm)
        of.page()
    row: Row = {
        "agents": n,
        "blocks": disk.stats()[0].n_blocks,
        "fill_s": round(filled, 2),
        "open_ms": round(opened, 2),
        "submit_ms": median(of.submission),
        "turn_ms": median(of.turn),
        "page_ms": median(lambda _: of.page()),
        "stats_ms": median(lambda _: timed(of.agents.stores)),
        "bytes_per_agent": resident // n,
    }
    of.engine.flush()
    used = disk.stats()[0].n_bytes
    of.engine.close()
    return row | {"evict_ms": evictions(folder, used, model), "ls_s": listing(folder)}


def median(sample: Callable[[int], float]) -> float:
    """The median of some repetitions."""
    return round(statistics.median(sample(number) for number in range(REPEATS)), 4)


def timed(action: Callable[[], object]) -> float:
    """Milliseconds of `action`."""
    begin = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - begin)


def evictions(folder: Path, max_bytes: int, model: MLXBackend) -> float:
    """Milliseconds of a put into a full store, which evicts."""
    disk = DiskStore.open(folder, max_bytes)
    scope = Scope(namespace(model), tenant_tag(disk.secret, "evicting"))
    layout = model.layout().name

    def put(number: int) -> float:
        (link,) = scope.chain((number,) * OWN_TOKENS)
        return timed(lambda: disk.put(StoredBlock(BlockHeader(link, Part.FULL, layout), BODY)))

    taken = median(put)
    disk.close()
    return taken


def listing(folder: Path) -> float:
    """Seconds of `semantic agents ls` in a process of its own."""
    command = [sys.executable, "-m", "semantic", "agents", "ls", "--store", str(folder)]
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    return round(time.perf_counter() - begin, 2)


def run(sizes: Sequence[int] = SIZES) -> Result:
    """The curve."""
    started = Run.start(
        "growth",
        QUESTION,
        model="semantic-tiny",
        parameters={"blocks": BLOCKS, "own_tokens": OWN_TOKENS, "page": PAGE, "repeats": REPEATS},
        seed=0,
    )
    rows = []
    for n in sizes:
        with stored.folder() as folder:
            rows.append(measure(folder, n))
        print(json.dumps(rows[-1]), flush=True)
    few, many = rows[0], rows[-1]
    ratio = float(str(many["turn_ms"])) / float(str(few["turn_ms"]))
    passed = (
        float(str(many["submit_ms"])) <= MOST_SUBMIT_MS
        and float(str(many["page_ms"])) <= MOST_PAGE_MS
        and float(str(many["open_ms"])) - float(str(few["open_ms"])) <= MOST_OPEN_MS
        and ratio <= MOST_TURN
    )
    verdict = Verdict(CRITERION, MOST_TURN, ratio, passed=passed)
    return started.finish(rows, {str(row["agents"]): dict(row) for row in rows}, verdict)


if __name__ == "__main__":
    print(json.dumps(run([int(one) for one in sys.argv[1:]] or SIZES).summary, indent=2))
