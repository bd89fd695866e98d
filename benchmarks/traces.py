"""Sessions of coding agents replayed against `semantic serve`: how much of the ceiling is reused.

Run: python -m benchmarks.traces FILE [--sessions N] [--turns N] [--kind NAME ...] [--kv-bits 8]
[--output DIR]

Several sessions at once, for models of full attention, windows, states and latents; with a pool of
all, half and a quarter of what the sessions hold, and with a kill -9 in the middle; beside
mlx_lm.server. The ceiling is the longest prefix that an earlier prompt of the session had.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.server_measures import MODEL_NAME
from benchmarks.server_process import ServerProcess, mlx_lm_server, semantic_server
from benchmarks.trace_sessions import (
    RecordedSession,
    Session,
    Turn,
    recorded_sessions,
    sessions,
    single_words,
)
from experiments.harness.document import Json, Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.adapters.mlx.kv_cache.eight_bits import PACKED_BITS, packed_spec
from semantic.adapters.mlx.kv_cache.model_spec import read_spec
from semantic.adapters.mlx.model.provider import load_tokenizer
from semantic.domain.value_objects import BLOCK_TOKENS, KvBits, ModelCacheSpec
from tests.zoo.configurations import VOCAB
from tests.zoo.folder import drawn, write_folder

QUESTION: Final = "How much of what a coding agent sends again is not computed again?"
CRITERION: Final = (
    "with a pool of all that is held at least 0.98 of the ceiling for full attention and latents, "
    "0.95 for windows and states; 0.9 with a quarter; a kill costs each session one turn at most"
)
ROWS: Final = {
    "full": "llama",
    "window": "gemma3_text+w1024",
    "hybrid": "qwen3_5",
    "latent": "deepseek_v3",
}
"""The kinds of models, and their rows of the zoo."""
LEAST: Final = {"full": 0.98, "latent": 0.98, "window": 0.95, "hybrid": 0.95}
LEAST_OF_A_QUARTER: Final = 0.9
_GIB: Final = 1 << 30
_ANSWER: Final = 2
_SECONDS: Final = 300.0
Row = dict[str, Scalar]


class RefusedError(RuntimeError):
    """A server refused a request."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is replayed: the first `turns` requests of so many sessions, `at_once` together."""

    sessions: int = 8
    turns: int = 40
    at_once: int = 4
    piece_tokens: int = 8
    kinds: tuple[str, ...] = tuple(ROWS)
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    kv_bits: KvBits = 16


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of the pool, and of the memory tier beside it; tokens of the longest request."""

    pool: int
    longest: int
    kv_bits: KvBits = 16

    def flags(self) -> tuple[str, ...]:
        """Those of `semantic serve`."""
        gib = f"{self.pool / _GIB:.6f}"
        sizes = ("--pool-gb", gib, "--ram-gb", gib, "--max-model-len", str(self.longest))
        force = ("--kv-bits-force",) * (self.kv_bits == PACKED_BITS)
        bits = ("--kv-bits", str(self.kv_bits), *force)
        return (*sizes, *bits, "--served-model-name", MODEL_NAME)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server reported of one request."""

    turn: Turn
    cached: int
    ttft: float
    after_kill: bool


@dataclass(slots=True)
class Replay:
    """Sends sessions to one server, several at once; each client sends again what fails. Each
    request has `headers()` more, and comes `pause` seconds after the answer before it."""

    server: ServerProcess
    sessions: Sequence[Session]
    at_once: int
    kills: bool = False
    pause: float = 0.0
    replies: list[Reply] = field(default_factory=list)
    headers: Callable[[], Mapping[str, str]] = dict
    _killed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """All requests; with `kills` the server is killed after half of them, and started again."""
        waiting: SimpleQueue[Session] = SimpleQueue()
        for session in self.sessions:
            waiting.put(session)
        clients = [
            threading.Thread(target=self._client, args=(waiting,)) for _ in range(self.at_once)
        ]
        for client in clients:
            client.start()
        half = sum(len(session.turns) for session in self.sessions) // 2
        while self.kills and len(self.replies) < half and any(one.is_alive() for one in clients):
            time.sleep(0.01)
        if self.kills:
            self.server.kill()
            self._killed = True
            self.server.start()
        for client in clients:
            client.join()
        if len(self.replies) < sum(len(session.turns) for session in self.sessions):
            raise RuntimeError(f"requests failed: {self.server.last_words()}")

    def _client(self, waiting: SimpleQueue[Session]) -> None:
        with suppress(Empty):
            while True:
                self._session(waiting.get_nowait())

    def _session(self, session: Session) -> None:
        met_kill = False
        for number, turn in enumerate(session.turns):
            time.sleep(self.pause if number else 0.0)
            reply = self._ask(turn)
            after_kill = self._killed and not met_kill
            met_kill |= after_kill
            with self._lock:
                self.replies.append(Reply(turn, *reply, after_kill=after_kill))

    def _ask(self, turn: Turn) -> tuple[int, float]:
        """Cached tokens and seconds to the first token; sent again until the server answers."""
        until = time.monotonic() + _SECONDS
        while True:
            try:
                return _complete(self.server.port, turn.prompt, self.headers())
            except (OSError, HTTPException):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)


def _complete(port: int, prompt: str, more: Mapping[str, str]) -> tuple[int, float]:
    """Cached tokens of a streamed completion, and seconds to its first event."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": _ANSWER,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    began = time.perf_counter()
    first, cached, ended = 0.0, None, False
    try:
        headers = {"Content-Type": "application/json", **more}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status >= 500:
            raise HTTPException(f"status {response.status}")
        if response.status != 200:
            raise RefusedError(f"status {response.status}: {response.read(400)!r}")
        for raw in iter(response.readline, b""):
            data = raw.decode("utf-8").strip().removeprefix("data:").strip()
            if raw.startswith(b"data:") and data == "[DONE]":
                ended = True
            elif raw.startswith(b"data:"):
                first = first or time.perf_counter() - began
                usage = json.loads(data).get("usage")
                if usage:
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    finally:
        connection.close()
    if cached is None or not ended:
        raise HTTPException("the stream ended early")
    return cached, first


def run(recorded: Sequence[RecordedSession], shape: Shape, python: Path) -> Result:
    """Replay for each kind of model; `python` has mlx-lm for the server beside ours."""
    started = Run.start(
        "traces_8_bits" if shape.kv_bits == PACKED_BITS else "traces",
        QUESTION,
        model=", ".join(f"{kind}: {ROWS[kind]}" for kind in shape.kinds),
        parameters={name: str(value) for name, value in asdict(shape).items()},
        seed=0,
    )
    words = single_words(load_tokenizer("semantic-tiny"), VOCAB)
    replayed = sessions(
        recorded[: shape.sessions], words, most_turns=shape.turns, piece_tokens=shape.piece_tokens
    )
    samples: list[Row] = []
    with TemporaryDirectory(prefix="semantic-traces-") as folder:
        for kind in shape.kinds:
            for row in _kind(kind, replayed, shape, Path(folder) / kind, python):
                print(json.dumps(row), flush=True)
                samples.append(row)
    missed = [f"{row['kind']}, {row['run']}" for row in samples if not row["met"]]
    summary: dict[str, Json] = {"rows": [{**row} for row in samples], "missed": [*missed]}
    verdict = Verdict(CRITERION, "none missed", ", ".join(missed) or "none missed", not missed)
    return started.finish(samples, summary, verdict)


def _kind(
    kind: str, replayed: Sequence[Session], shape: Shape, folder: Path, python: Path
) -> Iterator[Row]:
    model, spec = model_for(kind, replayed, folder / "model", shape.kv_bits)
    held = held_bytes(spec, replayed, shape.at_once)
    longest = longest_request(replayed)
    least = spec.bytes_for(longest + BLOCK_TOKENS)  # one request must fit
    for share in shape.shares:
        size = Size(max(int(share * held), least), longest, shape.kv_bits)
        yield _ours(kind, f"pool of {share:.0%}", share, size, replayed, shape, model, folder)
    size = Size(held, longest, shape.kv_bits)
    yield _ours(kind, "kill -9", shape.shares[0], size, replayed, shape, model, folder)
    if shape.kv_bits != PACKED_BITS:
        yield _theirs(kind, replayed, shape, model, folder, python)


def model_for(
    kind: str, replayed: Sequence[Session], folder: Path, kv_bits: KvBits = 16
) -> tuple[Path, ModelCacheSpec]:
    """A model of `kind` in `folder`, whose context has all prompts, and its caches. For caches of 8
    bits its heads are wide."""
    wide = kv_bits == PACKED_BITS
    model = write_folder(ROWS[kind], folder, wide=wide)
    _widen(model / "config.json", max(one.longest for one in replayed) + BLOCK_TOKENS)
    spec = read_spec(drawn(ROWS[kind], wide=wide))
    if spec is not None and wide:
        spec = packed_spec(spec)
    if spec is None:
        raise AssertionError(f"{ROWS[kind]} is no model")
    return model, spec


def longest_request(replayed: Sequence[Session]) -> int:
    """Tokens of the longest request, its answer included."""
    return max(one.longest for one in replayed) + _ANSWER


def _widen(file: Path, context: int) -> None:
    """Make a configuration's context `context` tokens."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for arguments in (config, config.get("text_config", {})):
        arguments |= {"max_position_embeddings": context}
    file.write_text(json.dumps(config), encoding="utf-8")


def held_bytes(spec: ModelCacheSpec, replayed: Sequence[Session], at_once: int) -> int:
    """Bytes of the caches of the longest sessions that run at once."""
    sizes = sorted((spec.bytes_for(one.longest + _ANSWER) for one in replayed), reverse=True)
    return sum(sizes[:at_once])


def _ours(
    kind: str,
    name: str,
    share: float,
    size: Size,
    replayed: Sequence[Session],
    shape: Shape,
    model: Path,
    folder: Path,
) -> Row:
    own = folder / name.replace(" ", "-")
    server = semantic_server(model, own, *size.flags())
    replay = Replay(server, replayed, shape.at_once, kills=name.startswith("kill"))
    server.start()
    try:
        replay.run()
    finally:
        server.stop()
    stored = sum(file.stat().st_size for file in (own / "store" / "blocks").rglob("*.*"))
    row = reuse_row(kind, name, replay)
    of_ceiling = float(str(row["of_ceiling"]))
    least = LEAST[kind] if share == shape.shares[0] else LEAST_OF_A_QUARTER
    met = row["lost_turns"] <= 1 if replay.kills else of_ceiling >= least  # type: ignore[operator]
    return row | {"stored_mb": round(stored / 1e6, 1), "met": bool(met)}


def _theirs(
    kind: str, replayed: Sequence[Session], shape: Shape, model: Path, folder: Path, python: Path
) -> Row:
    server = mlx_lm_server(model, folder / "mlx-lm", python)
    server.start()
    replay = Replay(server, replayed, shape.at_once)
    try:
        replay.run()
    finally:
        server.stop()
    return reuse_row(kind, "mlx_lm.server", replay) | {"stored_mb": 0.0, "met": True}


def reuse_row(kind: str, name: str, replay: Replay) -> Row:
    replies = replay.replies
    prompt = sum(one.turn.n_tokens for one in replies)
    ceiling = sum(one.turn.reusable for one in replies)
    # A prompt's last token is always computed; more than the ceiling may be shared by chance.
    cached = sum(min(one.cached, one.turn.reusable) for one in replies)
    times = sorted(1e3 * one.ttft for one in replies)
    after = [one for one in replies if one.after_kill]
    return {
        "kind": kind,
        "run": name,
        "requests": len(replies),
        "prompt_tokens": prompt,
        "ceiling": round(ceiling / prompt, 4),
        "of_ceiling": round(cached / max(1, ceiling), 4),
        "computed_over_needed": round((prompt - cached) / max(1, prompt - ceiling), 3),
        "ttft_p50_ms": round(statistics.median(times), 1),
        "ttft_p99_ms": round(times[min(len(times) - 1, int(0.99 * len(times)))], 1),
        "lost_turns": round(max(map(lost_turns, after), default=0.0), 3),
    }


def lost_turns(reply: Reply) -> float:
    """What the first request of a session after a kill computed again, in requests' new tokens."""
    own = max(1, reply.turn.n_tokens - reply.turn.reusable)
    return max(0, reply.turn.reusable - reply.cached) / own


def main() -> int:
    """1 if a run misses its figure."""
    parser = argparse.ArgumentParser(prog="benchmarks.traces", description=__doc__)
    parser.add_argument("file", type=Path, help="recorded sessions")
    usual = Shape()
    parser.add_argument("--sessions", type=int, default=usual.sessions)
    parser.add_argument("--turns", type=int, default=usual.turns)
    parser.add_argument("--piece-tokens", type=int, default=usual.piece_tokens)
    parser.add_argument("--kind", action="append", choices=[*ROWS])
    parser.add_argument("--kv-bits", type=int, choices=[PACKED_BITS, 16], default=16)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    kinds = tuple(given.kind or ROWS)
    shape = Shape(
        given.sessions, given.turns, piece_tokens=given.piece_tokens, kinds=kinds,
        kv_bits=given.kv_bits,
    )  # fmt: skip
    result = run(recorded_sessions(given.file), shape, given.python)
    given.output.mkdir(parents=True, exist_ok=True)
    result.write(given.output / f"{result.id}.json")
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
