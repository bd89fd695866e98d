"""A move to another replica against a prefill, and decoding while blocks are uploaded.

The object store is a folder, or what SEMANTIC_REMOTE_STORE names: `make test-fleet` has a real one.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks import stored
from benchmarks.rig import Rig
from benchmarks.shapes import smollm2_135m
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.remote.objects import Objects
from semantic.adapters.stores.remote.remote_store import RemoteStore
from semantic.adapters.stores.tiered import SharedTiers
from semantic.application.cache.discovery import Discovery
from semantic.application.cache.prefix_lookup import PrefixLookup
from semantic.composition.process_stores import remote_tier
from semantic.domain.block_hash import BlockLink, Part, Scope, namespace_of, tenant_tag
from semantic.domain.stored import BlockHeader, StoredBlock
from semantic.domain.value_objects import CompletedGeneration, TokenEvent

QUESTION = (
    "What does a move to another replica cost against a prefill, and decoding while uploading?"
)
CRITERION = "the median decode step is at most 2 % longer while blocks are uploaded at the set rate"
MOST = 1.02
LENGTH, MOVES = 1500, 3
STEPS, WINDOWS, AGENTS = 16, 16, 2
BYTES_PER_SECOND = 8 * (1 << 20) * (os.cpu_count() or 1)
"""As a server uploads."""
SECRET = bytes(range(32))


def run() -> Result:
    """Moves first, then decode steps with and without uploads, in turns."""
    started = Run.start(
        "moves",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={"tokens": LENGTH, "moves": MOVES, "windows": WINDOWS, "agents": AGENTS},
        seed=0,
    )
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        url = os.environ.get("SEMANTIC_REMOTE_STORE") or (Path(folder) / "bucket").as_uri()
        samples = [*moves(url), *steps(f"{url}/uploads")]
    middle = {what: statistics.median(each) for what, each in _by_kind(samples).items()}
    ratio = middle["step beside uploads"] / middle["step"]
    summary: dict[str, Json] = {
        "prefill_ms": round(middle["prefill"]),
        "move_ms": round(middle["move"]),
        "look_up_ms": round(middle["look-up"], 1),
        "mb": round(middle["bytes"] / 1e6, 1),
        "times": round(middle["prefill"] / middle["move"], 1),
        "step_ms": round(middle["step"], 2),
        "step_beside_uploads_ms": round(middle["step beside uploads"], 2),
        "longer_percent": round(100 * (ratio - 1), 2),
        "uploads_mb_s": round(BYTES_PER_SECOND / 1e6, 1),
    }
    return started.finish(
        samples, summary, Verdict(CRITERION, MOST, round(ratio, 4), passed=ratio <= MOST)
    )


def replica(url: str) -> SharedTiers:
    """A replica's store: memory, and the object store behind a queue."""
    remote = RemoteStore(Objects.open(url), SECRET)
    return SharedTiers(MemoryStore(1 << 33, secret=SECRET), BackgroundStore(remote, 1 << 33))


def moves(url: str) -> Iterator[dict[str, Scalar]]:
    """Milliseconds to the first token of agents that are computed, and of the same moved."""
    model = smollm2_135m()
    for number in range(MOVES):
        tokens = [1 + (i * 31 + number * 7) % 997 for i in range(LENGTH)]
        one, other = replica(url), replica(url)
        here = Rig.build(model, store=one, model_id=stored.MODEL_ID)
        yield {"what": "prefill", "value": 1e3 * first_token(here, tokens)}
        one.flush()
        there = Rig.build(model, store=other, model_id=stored.MODEL_ID)
        remote = remote_tier(other)
        if remote is None:
            raise AssertionError("the replica has no remote tier")
        discovery = Discovery(there.backend, other, remote)
        begun = time.perf_counter()
        discovery.look_up("ann", "", tokens)
        looked_up = time.perf_counter() - begun
        yield {"what": "look-up", "value": 1e3 * looked_up}
        yield {"what": "bytes", "value": float(_bytes_of(there, other, tokens))}
        yield {"what": "move", "value": 1e3 * (looked_up + first_token(there, tokens))}
        discovery.close()
        for rig in (here, there):
            rig.engine.close()


def _bytes_of(rig: Rig, store: SharedTiers, tokens: list[int]) -> int:
    """Bytes of what is found of a prompt."""
    layout = rig.backend.layout()
    scope = Scope(namespace_of(rig.backend.model_id, layout.name), tenant_tag(SECRET, ""))
    links = [link for link in scope.chain(tokens[:-1]) if link.is_full]
    prefix = PrefixLookup(store, layout).find(scope, links, tokens[:-1])
    return 0 if prefix is None else prefix.n_bytes


def first_token(rig: Rig, tokens: list[int]) -> float:
    """Seconds to the first token of a prompt, to its end."""
    begun = time.perf_counter()
    rig.engine.submit("ann", tokens, max_tokens=2)
    seconds = 0.0
    for event in _events(rig):
        if isinstance(event, TokenEvent) and not seconds:
            seconds = time.perf_counter() - begun
    return seconds


def _events(rig: Rig) -> Iterator[object]:
    while rig.engine.has_work:
        yield from rig.engine.step_once()


def steps(url: str) -> Iterator[dict[str, Scalar]]:
    """Milliseconds of decode steps, in windows with and without an upload in progress."""
    rig = Rig.build(smollm2_135m())
    for number in range(AGENTS):
        tokens = rig.add_idle_agent(f"agent-{number}", 512)
        rig.engine.submit(f"agent-{number}", (*tokens, 1), max_tokens=STEPS * WINDOWS * 2)
    for _ in range(8):
        rig.engine.step_once()
    remote = RemoteStore(Objects.open(url), SECRET)
    uploads = BackgroundStore(remote, 1 << 33, bytes_per_second=BYTES_PER_SECOND)
    n_bytes = sum(rig.spec.bytes_per_block(layer) for layer in range(rig.spec.n_layers))
    body, blocks = os.urandom(n_bytes), iter(_blocks())
    for window in range(WINDOWS):
        is_uploading = window % 2 == 1
        if is_uploading:
            for _ in range(4):
                uploads.put(StoredBlock(next(blocks), body))
        for _ in range(STEPS):
            begun = time.perf_counter()
            events = rig.engine.step_once()
            seconds = time.perf_counter() - begun
            if any(isinstance(one, CompletedGeneration) for one in events):
                raise AssertionError("the agents ended before the windows did")
            what = "step beside uploads" if is_uploading else "step"
            yield {"what": what, "value": 1e3 * seconds}
        if is_uploading:
            uploads.flush()
    uploads.close()


def _blocks() -> Iterator[BlockHeader]:
    scope = Scope(bytes(32), bytes(32))
    for number in range(1 << 20):
        link: BlockLink = next(scope.chain([number] * 256))
        yield BlockHeader(link, Part.FULL, "benchmark")


def _by_kind(samples: list[dict[str, Scalar]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for sample in samples:
        found.setdefault(str(sample["what"]), []).append(float(str(sample["value"])))
    return found
