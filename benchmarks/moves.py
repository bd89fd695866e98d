"""A move to another replica against a prefill, over networks of several speeds.

The object store is a folder, or what SEMANTIC_REMOTE_STORE names; `python -m tests.fleet.seaweed
COMMAND` runs a command beside a real one.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX

from benchmarks import stored
from benchmarks.rig import Rig
from benchmarks.shapes import smollm2_135m
from benchmarks.uploads import Row, blocks, medians
from experiments.harness.document import Json
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.stores.background import BackgroundStore
from semantic.adapters.stores.memory import MemoryStore
from semantic.adapters.stores.tiered import SharedTiers
from semantic.application.cache.prefix_lookup import Discovery, PrefixLookup
from semantic.composition.process_stores import remote_tier
from semantic.domain.block_hash import Scope, namespace_of, tenant_tag
from semantic.domain.stored import StoredBlock
from semantic.domain.value_objects import CompletedGeneration, TokenEvent
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.remote_store import RemoteStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

QUESTION = "What does a move to another replica cost against a prefill?"
CRITERION = "in the median a prompt that another replica has computed is there 4 times as soon"
LEAST_TIMES = 4.0
LENGTH, MOVES = 1500, 3
NETWORKS, SHORT, DECIDED = (0.25, 4.0), 600, 2
"""Networks as parts of the break-even, tokens of a prompt there, and how many are decided."""
OBJECTS = 2000
"""Small objects that are listed."""
TRANSFERS = 16
"""Bodies that are uploaded and read."""
SECRET = bytes(range(32))


def run() -> Result:
    """Moves first, then slow networks."""
    started = Run.start(
        "moves",
        QUESTION,
        model="SmolLM2-135M shape, random fp32 weights",
        parameters={"tokens": LENGTH, "moves": MOVES},
        seed=0,
    )
    with TemporaryDirectory(prefix="semantic-benchmark-") as folder:
        url = os.environ.get("SEMANTIC_REMOTE_STORE") or (Path(folder) / "bucket").as_uri()
        samples = [*requests(url), *transfers(below(url, "transfers")), *moves(below(url))]
        middle = medians(samples)
        even = middle["bytes"] / middle["prefill"] * 1e3
        samples += networks(url, even)
    middle = medians(samples)
    summary: dict[str, Json] = {
        "store": url.split(":", 1)[0],
        "prefill_ms": round(middle["prefill"]),
        "move_ms": round(middle["move"]),
        "look_up_ms": round(middle["look-up"], 1),
        "mb": round(middle["bytes"] / 1e6, 1),
        "times": round(middle["prefill"] / middle["move"], 1),
        "break_even_mb_s": round(even / 1e6, 1),
        "networks": [{k: v for k, v in one.items() if k != "what"} for one in samples
                     if one["what"] == "network"],
        "upload_s_per_gb": round(middle["upload, processor seconds for a GB"], 2),
        "read_s_per_gb": round(middle["read, processor seconds for a GB"], 2),
        "head_ms": round(middle["HEAD"], 2),
        "put_ms": round(middle["PUT"], 2),
        "list_page_ms": round(middle["LIST"], 1),
    }  # fmt: skip
    times = middle["prefill"] / middle["move"]
    verdict = Verdict(CRITERION, LEAST_TIMES, round(times, 1), passed=times >= LEAST_TIMES)
    return started.finish(samples, summary, verdict)


class SlowObjects(Objects):
    """An object store behind a network of `bytes_per_second`, which all readers share."""

    bytes_per_second = float("inf")

    def read(self, path: str, start: int, stop: int) -> Buffer:
        with _NETWORK:
            time.sleep((stop - start) / self.bytes_per_second)
        return super().read(path, start, stop)


_NETWORK = threading.Lock()


def below(url: str, name: str = "") -> str:
    """A prefix of an object store; of one in a folder it is made."""
    if url.startswith("file:"):
        Path(urlsplit(url).path, name).mkdir(parents=True, exist_ok=True)
    return f"{url}/{name}".rstrip("/")


def requests(url: str) -> Iterator[Row]:
    """Milliseconds of requests with few bytes, and of a page of 1,000 names."""
    objects = Objects.open(below(url, "small"))
    for number in range(OBJECTS):
        yield _timed("PUT", partial(objects.create, f"x/{number:06}", b"small"))
    for number in range(0, OBJECTS, 20):
        yield _timed("HEAD", partial(objects.size, f"x/{number:06}"))
    for _ in range(5):
        whole = _timed("LIST", lambda: objects.listed("x", OBJECTS))
        yield whole | {"value": float(str(whole["value"])) * 1000 / OBJECTS}


def _timed(what: str, does: Callable[[], object]) -> Row:
    begun = time.perf_counter()
    does()
    return {"what": what, "value": 1e3 * (time.perf_counter() - begun)}


def replica(url: str, kind: type[Objects] = Objects) -> SharedTiers:
    """A replica's store: memory, and the object store behind a queue."""
    remote = RemoteStore(kind.open(url), SECRET)
    return SharedTiers(MemoryStore(1 << 33, secret=SECRET), BackgroundStore(remote, 1 << 33))


def moves(url: str) -> Iterator[Row]:
    """Milliseconds to the first token of agents that are computed, and of the same moved."""
    model = smollm2_135m()
    for number in range(MOVES):
        tokens = _prompt(LENGTH, number)
        one, other = replica(url), replica(url)
        here = Rig.build(model, store=one, model_id=stored.MODEL_ID)
        yield {"what": "prefill", "value": 1e3 * first_token(here, tokens)[0]}
        one.flush()
        there = Rig.build(model, store=other, model_id=stored.MODEL_ID)
        looked_up = _look_up(there, other, tokens)
        yield {"what": "look-up", "value": 1e3 * looked_up}
        yield {"what": "bytes", "value": float(_bytes_of(there, other, tokens))}
        yield {"what": "move", "value": 1e3 * (looked_up + first_token(there, tokens)[0])}
        for rig in (here, there):
            rig.engine.close()


def networks(url: str, even: float) -> Iterator[Row]:
    """What a replica does behind networks that are slower and faster than `even` bytes a second:
    the first prompt is read to measure it, then each is decided."""
    model = smollm2_135m()
    for share in NETWORKS:
        prompts = [_prompt(SHORT, 100 + number) for number in range(1 + DECIDED)]
        place = below(url, f"{share}")
        one, other = replica(place), replica(place, SlowObjects)
        here = Rig.build(model, store=one, model_id=stored.MODEL_ID)
        computed = [first_token(here, tokens)[0] for tokens in prompts]
        one.flush()
        there = Rig.build(model, store=other, model_id=stored.MODEL_ID)
        first_token(there, _prompt(SHORT, 99))  # what computing takes is measured first
        SlowObjects.bytes_per_second = share * even
        found = []
        for tokens in prompts:
            _look_up(there, other, tokens)
            found.append(first_token(there, tokens))
        yield {
            "what": "network",
            "of_break_even": share,
            "measured_first_ms": round(1e3 * found[0][0]),
            "then_ms": round(1e3 * statistics.median(seconds for seconds, _ in found[1:])),
            "computed_ms": round(1e3 * statistics.median(computed)),
            "then_read": sum(cached > 0 for _, cached in found[1:]),
            "of": DECIDED,
        }
        for rig in (here, there):
            rig.engine.close()


def _prompt(n_tokens: int, number: int) -> list[int]:
    return [1 + (i * 31 + number * 7) % 997 for i in range(n_tokens)]


def _look_up(rig: Rig, store: SharedTiers, tokens: list[int]) -> float:
    """Seconds to learn what the object store has of a prompt."""
    remote = remote_tier(store)
    if remote is None:
        raise AssertionError("the replica has no remote tier")
    discovery = Discovery(rig.backend, store, remote)
    begun = time.perf_counter()
    discovery.look_up("ann", "", tokens)
    looked_up = time.perf_counter() - begun
    discovery.close()
    return looked_up


def _bytes_of(rig: Rig, store: SharedTiers, tokens: list[int]) -> int:
    """Bytes of what is found of a prompt."""
    layout = rig.backend.layout()
    scope = Scope(namespace_of(rig.backend.model_id, layout.name), tenant_tag(SECRET, ""))
    links = [link for link in scope.chain(tokens[:-1]) if link.is_full]
    prefix = PrefixLookup(store, layout).find(scope, links, tokens[:-1])
    return 0 if prefix is None else prefix.n_bytes


def first_token(rig: Rig, tokens: list[int]) -> tuple[float, int]:
    """Seconds to the first token of a prompt, to its end, and how many tokens were cached."""
    begun = time.perf_counter()
    rig.engine.submit("ann", tokens, max_tokens=2)
    seconds, cached = 0.0, 0
    for event in _events(rig):
        if isinstance(event, TokenEvent) and not seconds:
            seconds = time.perf_counter() - begun
        if isinstance(event, CompletedGeneration):
            cached = event.cached_tokens
    return seconds, cached


def _events(rig: Rig) -> Iterator[object]:
    while rig.engine.has_work:
        yield from rig.engine.step_once()


def transfers(url: str) -> Iterator[Row]:
    """Processor seconds of this process for a GB that is uploaded and read, and nothing else."""
    remote, body = RemoteStore(Objects.open(url), SECRET), os.urandom(12 << 20)
    for header in islice(blocks(), TRANSFERS):
        begun = time.process_time()
        remote.put(StoredBlock(header, body))
        written = time.process_time()
        if remote.read(header) != body:
            raise AssertionError("what was read is not what was written")
        read = time.process_time()
        for what, seconds in (("upload", written - begun), ("read", read - written)):
            value = seconds / len(body) * 1e9
            yield {"what": f"{what}, processor seconds for a GB", "value": value}
    remote.close()
