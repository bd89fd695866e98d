"""What the store writes: bytes over bytes of distinct content, and what the kernel adds to them.

The life of conversations on tiny models of several kinds, of which every written block is counted
by its key and tokens; then blocks of usual sizes, for which `/proc/self/io` is compared with what
the store counts. Linux only.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks import stored
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.stores.disk.store import DiskStore
from semantic.domain.block_hash import BlockKey, BlockLink, Part, Scope
from semantic.domain.stored import BlockHeader, Manifest, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS
from tests.support.durable import TINY_MEMORY, Asked, history, running, text

Row = dict[str, Scalar]

QUESTION = "How much of what the store writes is written twice, and what does the kernel add?"
CRITERION = "no block file is written twice while the store has it: bytes so written, of all kinds"
KINDS = {
    "full attention": "llama",
    "windows": "gemma3",
    "latents": "deepseek_v3",
    "short states": "lfm2",
    "long states": "falcon_h1",
    "quantized": "quantized",
}
FIRST, NEW, ANSWER, TURNS = 1200, 700, 40, 6
MIB = 1 << 20
BODIES = (MIB, 8 * MIB, 32 * MIB)
BLOCKS = 12


def run() -> Result:
    """First the conversations, then the kernel."""
    started = Run.start(
        "ssd_wear",
        QUESTION,
        model="tiny models of each kind",
        parameters={"first": FIRST, "new": NEW, "answer": ANSWER, "turns": TURNS, "blocks": BLOCKS},
        seed=0,
    )
    kinds = [lived(kind, architecture) for kind, architecture in KINDS.items()]
    kernel = [amplified(n_bytes) for n_bytes in BODIES]
    again = sum(int(str(row["again_bytes"])) for row in kinds)
    summary: dict[str, Json] = {
        "kinds": [{**row} for row in kinds],
        "kernel": [{**row} for row in kernel],
    }
    return started.finish(
        [*kinds, *kernel], summary, Verdict(CRITERION, 0, again, passed=again == 0)
    )


# Conversations


class Writes:
    """Every block that was written, in order."""

    def __init__(self) -> None:
        self.blocks: list[StoredBlock] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what reaches the disk meanwhile."""
        put = DiskStore.put

        def recording(store: DiskStore, block: StoredBlock) -> bool:
            before = _written(store)
            is_stored = put(store, block)
            if _written(store) > before:
                self.blocks.append(block)
            return is_stored

        with patch.object(DiskStore, "put", recording):
            yield

    def row(self, kind: str) -> Row:
        """Bytes of bodies: in all, distinct, of keys that were written before, of tails."""
        total = sum(len(block.body) for block in self.blocks)
        again = self._again()
        distinct = self._distinct()
        return {
            "kind": kind,
            "blocks": len(self.blocks),
            "bytes": total,
            "distinct_bytes": distinct,
            "again_bytes": again,
            "tail_bytes": total - again - distinct,
            "over_distinct": round(total / distinct, 3),
        }

    def _again(self) -> int:
        seen: set[BlockKey] = set()
        again = 0
        for block in self.blocks:
            again += len(block.body) if block.header.key in seen else 0
            seen.add(block.header.key)
        return again

    def _distinct(self) -> int:
        """Each token's keys and values once, whichever blocks have them; other bodies by key."""
        tokens: set[tuple[bytes, tuple[int, ...]]] = set()
        per_token: int = 0
        others: dict[BlockKey, int] = {}
        for block in self.blocks:
            link = block.header.link
            if block.header.part is Part.FULL:
                per_token = len(block.body) // len(link.tokens)
                tokens.update(
                    (link.parent, link.tokens[:n]) for n in range(1, len(link.tokens) + 1)
                )
            else:
                others[block.header.key] = len(block.body)
        return len(tokens) * per_token + sum(others.values())


def lived(kind: str, architecture: str) -> Row:
    """Conversations that are continued, restarted, forked, shortened, and restored from disk."""
    writes = Writes()
    with stored.folder() as folder, writes.recorded():
        with running(architecture, folder) as life:
            prompt = text(FIRST, 1)
            for turn in range(TURNS):
                done = life.ask("ann", prompt, ANSWER)
                prompt = (*history(prompt, done), *text(NEW, 10 + turn))
            life.ask_all([Asked(name, text(900, 2), ANSWER) for name in ("bea", "cyd")])
        with running(architecture, folder, memory_bytes=TINY_MEMORY, columns=24) as life:
            past = life.manifest("ann").token_ids
            done = life.ask("ann", (*past, *text(NEW, 20)), ANSWER)
            life.ask("fay", (*past, *text(NEW, 21)), ANSWER)  # goes on from there as another
            for turn in range(2):  # each evicts the other from the pool
                for name in ("bea", "cyd"):
                    again = life.manifest(name).token_ids
                    life.ask(name, (*again, *text(NEW, 30 + turn)), ANSWER)
            life.ask("ann", (*past[:300], *text(500, 40)), ANSWER)  # its client compacts
            life.ask("ann", (*past, *text(NEW, 20)), ANSWER)  # and takes it back
    return writes.row(kind)


def _written(store: DiskStore) -> int:
    return store.stats()[0].counts["written"]


# The kernel


def amplified(n_bytes: int) -> Row:
    """Blocks of `n_bytes` and a turn's end after each three: what reaches the drive for them."""
    scope, tokens = Scope(bytes(32), bytes(32)), text(BLOCKS * BLOCK_TOKENS, 3)
    body = os.urandom(n_bytes)
    with stored.folder() as folder:
        store = DiskStore.open(folder, stored.ROOM)
        os.sync()
        before, counts = _kernel_bytes(), Counter[str]()
        for number, link in enumerate(scope.chain(tokens), 1):
            store.put(StoredBlock(_header(link), body))
            if number % 3 == 0:
                store.save(Manifest(scope, "ann", tokens[: number * BLOCK_TOKENS]))
                counts["saves"] += 1
        os.sync()
        kernel = _kernel_bytes() - before
        wear = store.stats()[0].wear
        store.close()
    payload = BLOCKS * n_bytes
    return {
        "body_mib": n_bytes // MIB,
        "payload_bytes": payload,
        "counted_bytes": 0 if wear is None else wear.total,
        "kernel_bytes": kernel,
        "kernel_over_payload": round(kernel / payload, 4),
        "index_kib_per_write": round((kernel - payload) / 1024 / (BLOCKS + counts["saves"]), 1),
    }


def _header(link: BlockLink) -> BlockHeader:
    return BlockHeader(link, Part.FULL, "benchmark")


def _kernel_bytes() -> int:
    """Bytes that this process has caused to be written to drives."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])
