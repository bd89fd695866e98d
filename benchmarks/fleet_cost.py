"""What fleets of many sizes ask of their object store: requests, bytes, money and hits.

Run: python -m benchmarks.fleet_cost FILE [--output DIR]

Recorded sessions of coding agents on a virtual clock; their requests go to a home replica or to
any. Nothing is asked and no model runs: what a look-up, a turn and a read cost in requests is
counted as `RemoteStore` does it, which a test compares, and rates are measured ones. See
`trace_sessions` for the file, `fleet_requests` for what is simulated and `ASSUMED` for the rest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final, NamedTuple, cast

from benchmarks.absence import Recorded, Row
from benchmarks.fleet_requests import Replicas, Routing, Session, Use, residence, sessions
from benchmarks.returns import measured as measured_speeds
from benchmarks.trace_sessions import recorded_sessions
from experiments.harness.document import Json
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.stores.write_order import LEAST_REST
from semantic.composition.process_stores import upload_threads
from semantic.domain.value_objects import BLOCK_TOKENS

QUESTION: Final = "What does a fleet ask of its object store, and up to which size does that pay?"
CRITERION: Final = (
    "with 1,000 replicas the cached share over the ceiling is at least 0.97 with affinity and 0.9 "
    "with random routing, also if each replica is lost once a day"
)
LEAST: Final = {"affinity": 0.97, "random": 0.9}
RESULTS: Final = Path(__file__).parent / "results"
BYTES_PER_TOKEN: Final = 1 << 17
"""An 8B model's keys and values in 16 bits: 32 layers of 8 heads of 128."""
BLOCK_BYTES: Final = BYTES_PER_TOKEN * BLOCK_TOKENS
IN_SESSION: Final = 0.25
"""The part of all agents that are in a session at a time."""
MONTH: Final = 30 * 86400.0
PAGE: Final = 1000
JANITOR_BYTES: Final = 100
"""Of memory for each object, at most."""

PRICES: Final = {"write": 5e-6, "read": 4e-7, "gb_month": 0.021, "egress_gb": 0.09}
"""Dollars. The first three are Amazon S3 Standard's in us-east-1 (PUT and LIST, GET and HEAD; more
than 500 TB; DELETE and traffic within the region cost nothing), `egress_gb` is to the internet."""
LIMITS: Final = {"write": 3500.0, "read": 5500.0}
"""Requests per second of a partitioned prefix, of Amazon's guide to optimizing S3's performance."""
ASSUMED: Final = (
    "a quarter of the agents is in a session at a time, and sessions follow each other as recorded",
    "sessions share no block with others, which overstates bytes",
    "a full-attention model of 8B: 128 KiB a token; windows, states and latents store less",
    "a replica and the bucket each keep what was used within the time for which their bytes last",
    "the janitor knows every use; what it evicted and a replica still has is not uploaded again",
    "with affinity one request in twenty goes to another replica, because its own is too busy",
    "what waits to be uploaded is late by its bytes over the rate",
    "what exceeds the rate is dropped by whole turns, and no look-up finds what follows a gap",
    "a lost replica loses its drive and what waits to be uploaded; its agents go to others",
    "what a network faster than computing delivers is read, else nothing is; the rest is computed",
    "requests for keys of tenants, logs of uses, retries and stored responses are left out",
    "decoding does not use the cores that upload: each sends what it was measured to on a CPU",
    "an hour of a GPU host costs 3 dollars, and of a Mac half a dollar",
)


class Host(NamedTuple):
    """A kind of machine."""

    name: str
    agents: int
    """That have it as their home."""
    prefill: float
    """Tokens per second."""
    cores: int
    drive_bytes: float
    network: float
    """Bytes per second, in each direction."""
    uploads: float
    """Bytes per second that it uploads at most."""
    hourly: float
    """Dollars."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines and what is asked of them."""

    host: Host
    n_hosts: int
    routing: Routing
    losses_a_day: float
    bucket_hours: float

    @property
    def active(self) -> float:
        """Sessions in progress at a time."""
        return self.n_hosts * self.host.agents * IN_SESSION


GPU_CORES: Final = 16
NIC: Final = 100e9 / 8
SIZES: Final = (10, 100, 1000)
ROUTINGS: Final[tuple[Routing, ...]] = ("affinity", "random")
HOURS: Final = (0.25, 1.0, 4.0, 24.0, 168.0)
"""How long the bucket keeps what is not used, in the sweep."""
USUAL_HOURS: Final = 4.0


def hosts() -> tuple[Host, ...]:
    """A GPU host with the prefill rate that was measured, and a Mac with an assumed rate."""
    gpu = Host("H200", 1000, measured_speeds().prefill, GPU_CORES, 4e12, NIC, 0.0, 3.0)
    mac = Host("Mac, assumed", 40, 1000.0, 12, 5e11, 10e9 / 8, 0.0, 0.5)
    return tuple(one._replace(uploads=_uploads(one)) for one in (gpu, mac))


def _uploads(host: Host) -> float:
    """Bytes per second that a host uploads whose decode steps uploads do not lengthen: of all its
    threads with the least rests, or half of its network."""
    each = 1e9 / transfers()["upload_s_per_gb"]
    return min(host.network / 2, upload_threads(host.cores) * each / (1 + LEAST_REST))


def transfers() -> dict[str, float]:
    """What `benchmarks moves` measured of the object store's client."""
    found = json.loads((RESULTS / "moves.json").read_text("utf-8"))["summary"]
    return {name: float(found[name]) for name in ("upload_s_per_gb", "read_s_per_gb")} | {
        "list_page_s": float(found["list_page_ms"]) / 1e3
    }


def simulated(found: Sequence[Session], fleet: Fleet) -> tuple[Use, float]:
    """All sessions through a fleet, of which each replica's drive keeps what fits; and what there
    is to upload over what can be."""
    starts = fleet.active / mean_seconds(found)
    replicas = Replicas(
        fleet.routing,
        fleet.n_hosts,
        losses_per_second=fleet.losses_a_day / 86400,
        upload_rate=fleet.host.uploads,
        bytes_per_block=BLOCK_BYTES,
        bucket_seconds=fleet.bucket_hours * 3600 if _reads(fleet.host) else 0.0,
    )
    blocks = fleet.host.drive_bytes / BLOCK_BYTES * fleet.n_hosts
    kept = _lasting(replicas.gaps(found), blocks / starts * len(found))
    use = replicas.run(found, kept)
    demand = use.uploaded * BLOCK_BYTES * starts / len(found) / fleet.n_hosts
    share = demand / fleet.host.uploads
    return (use if share <= 1 else replace(replicas, uploaded=1 / share).run(found, kept)), share


def _reads(host: Host) -> bool:
    return host.network > host.prefill * BYTES_PER_TOKEN


def _lasting(gaps: Sequence[tuple[float, int]], block_seconds: float) -> float:
    """For how many seconds blocks are kept that take so many block-seconds in all."""
    low, high = 0.0, 30 * 86400.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if residence(gaps, middle) <= block_seconds else (low, middle)
    return low


def mean_seconds(found: Sequence[Session]) -> float:
    """Of a session."""
    return sum(one[-1][0] - one[0][0] for one in found) / len(found)


def row(found: Sequence[Session], fleet: Fleet, measured: dict[str, float]) -> Row:
    """One line of the table; see docs/measurements/fleet.md for what its columns are."""
    (use, uploads), host = simulated(found, fleet), fleet.host
    starts = fleet.active / mean_seconds(found)  # sessions per second
    each = starts / len(found)  # of what was simulated, per second
    per_second = {name: n * each for name, n in use.requests.items()}
    writes, reads = per_second["PUT"] + per_second["LIST"], per_second["GET"] + per_second["HEAD"]
    stored = residence(use.bucket_gaps, fleet.bucket_hours * 3600) * each
    objects = stored + (use.small * each) * fleet.bucket_hours * 3600
    bytes_in, bytes_out = (n * BLOCK_BYTES * each for n in (use.uploaded, use.read))
    money = MONTH * (PRICES["write"] * writes + PRICES["read"] * reads)
    keeping = stored * BLOCK_BYTES / 1e9 * PRICES["gb_month"]
    # What a network does not deliver is computed.
    delivered = min(1.0, fleet.n_hosts * host.network / bytes_out) if bytes_out else 1.0
    computed = use.computed + (1 - delivered) * use.read
    saved = delivered * use.read * BLOCK_TOKENS * each / host.prefill / 3600 * host.hourly * MONTH
    processor = bytes_in * measured["upload_s_per_gb"] + bytes_out * measured["read_s_per_gb"]
    return {
        "host": host.name,
        "hosts": fleet.n_hosts,
        "agents": fleet.n_hosts * host.agents,
        "routing": fleet.routing,
        "losses_a_day": fleet.losses_a_day,
        "bucket_hours": fleet.bucket_hours,
        "of_ceiling": round((use.local + delivered * use.read) / use.ceiling, 4),
        "local": round(use.local / use.ceiling, 4),
        "head_s": round(per_second["HEAD"], 1),
        "get_s": round(per_second["GET"], 1),
        "put_s": round(per_second["PUT"], 1),
        "list_s": round(per_second["LIST"], 1),
        "in_gb_s": round(bytes_in / 1e9, 3),
        "out_gb_s": round(bytes_out / 1e9, 3),
        "stored_tb": round(stored * BLOCK_BYTES / 1e12, 2),
        "objects_m": round(objects / 1e6, 2),
        "requests_usd": round(money),
        "storage_usd": round(keeping),
        "saved_usd": round(saved),
        "egress_usd": round(bytes_out * MONTH / 1e9 * PRICES["egress_gb"]),
        "hosts_usd": round(fleet.n_hosts * host.hourly * MONTH / 3600),
        "partitions": ceil(max(writes / LIMITS["write"], reads / LIMITS["read"])),
        "list_h": round(objects / PAGE * measured["list_page_s"] / 3600, 2),
        "janitor_gb": round(objects * JANITOR_BYTES / 1e9, 2),
        "network_share": round(
            max(bytes_in, bytes_out) / fleet.n_hosts / host.network, 4
        ),
        "uploads_share": round(uploads, 2),
        "cores": round(processor / 1e9 / fleet.n_hosts, 3),
        "break_even_gbit": round(8 * host.prefill * BYTES_PER_TOKEN / 1e9, 1),
        "prefill_share": round(
            computed * BLOCK_TOKENS * each / fleet.n_hosts / host.prefill, 3
        ),
    }  # fmt: skip


def run(recorded: Sequence[Sequence[Recorded]]) -> Result:
    """All sizes, both routings, with and without losses; then how long the bucket keeps."""
    measured = transfers()
    started = Run.start(
        "fleet_cost",
        QUESTION,
        model="none: lengths and times of the recording, rates of moves and gpu_prefill",
        parameters={
            "sessions": len(recorded),
            "in_session": IN_SESSION,
            "bytes_per_token": BYTES_PER_TOKEN,
            "gpu_cores": GPU_CORES,
            **{f"usd_{name}": price for name, price in PRICES.items()},
            **{name: round(value, 4) for name, value in measured.items()},
        },
        seed=0,
    )
    found = sessions(recorded)
    rows = [row(found, fleet, measured) for fleet in _fleets()]
    kept = [row(found, fleet, measured) for fleet in _keeping()]
    worst = {name: _worst(rows, name) for name in LEAST}
    summary: dict[str, Json] = {
        "rows": [_shown(one, HITS) for one in rows],
        "store": [_shown(one, STORE) for one in rows if not one["losses_a_day"]],
        "kept": [_shown(one, KEPT) for one in kept],
        "assumed": [*ASSUMED],
        "worst": {**worst},
    }
    passed = all(worst[name] >= least for name, least in LEAST.items())
    return started.finish(rows + kept, summary, Verdict(CRITERION, "0.97, 0.9", str(worst), passed))


HITS: Final = (
    "host", "hosts", "agents", "routing", "losses_a_day", "of_ceiling", "local", "prefill_share",
    "network_share", "uploads_share", "cores",
)  # fmt: skip
STORE: Final = (
    "host", "hosts", "routing", "head_s", "get_s", "put_s", "list_s", "in_gb_s", "out_gb_s",
    "stored_tb", "objects_m", "requests_usd", "storage_usd", "egress_usd", "saved_usd", "hosts_usd",
    "partitions", "list_h", "janitor_gb",
)  # fmt: skip
KEPT: Final = (
    "bucket_hours", "routing", "of_ceiling", "stored_tb", "requests_usd", "storage_usd",
    "saved_usd", "list_h",
)  # fmt: skip


def _shown(one: Row, names: Sequence[str]) -> dict[str, Json]:
    return {name: one[name] for name in names}


def _worst(rows: Sequence[Row], routing: str) -> float:
    """The least share of the ceiling in the largest fleet."""
    shares = (
        float(str(one["of_ceiling"]))
        for one in rows
        if (one["hosts"], one["routing"]) == (SIZES[-1], routing)
    )
    return min(shares)


def _fleets() -> Iterator[Fleet]:
    for host in hosts():
        for n_hosts in SIZES:
            for routing in ROUTINGS:
                for losses in (0.0, 1.0) if n_hosts == SIZES[-1] else (0.0,):
                    yield Fleet(host, n_hosts, routing, losses, USUAL_HOURS)


def _keeping() -> Iterator[Fleet]:
    one = Fleet(hosts()[0], SIZES[-1], "affinity", 1.0, USUAL_HOURS)
    for routing in ROUTINGS:
        for hours in HOURS:
            yield replace(one, routing=routing, bucket_hours=hours)


def main() -> int:
    """1 if a fleet misses its share."""
    parser = argparse.ArgumentParser(prog="benchmarks.fleet_cost", description=__doc__)
    parser.add_argument("file", type=Path, help="recorded sessions")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    recorded = [cast(Sequence[Recorded], one["requests"]) for one in recorded_sessions(given.file)]
    result = run(recorded)
    given.output.mkdir(parents=True, exist_ok=True)
    result.write(given.output / "fleet_cost.json")
    print(json.dumps(result.summary, indent=1))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
