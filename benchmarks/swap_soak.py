"""Soak test of a server whose models do not all fit: agents of three models and three tenants ask
for minutes, and a bucket keeps what the disk may lose.

Meanwhile clients leave, an operator unloads, a model's file is damaged and mended, and the process
is killed while it loads. Each answer is compared with that of the model alone. With --steady
nothing is killed or damaged, and the process must keep to its memory, files and threads. Run:
python -m benchmarks.swap_soak [--minutes M] [--steady] [--output DIR].
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from benchmarks.server_process import ServerProcess, semantic_server
from benchmarks.soak import judge, summarise
from experiments.harness.document import Scalar
from experiments.harness.record import Run
from experiments.harness.result import Result, Verdict
from semantic.composition.named_models import load_tokenizer
from semantic.domain.match import MatchEnd
from tests.support.model_folder import write_model
from tests.support.rounding import most_rounding

QUESTION = "Does a server whose models take turns in memory lose an agent, a token or a request?"
CRITERION = (
    "agents of three models of which two fit: no answer differs from that of the model alone, none "
    "fails but while its model's file is damaged or the process was killed, and each turn "
    "continues from the one before unless the process was killed since or reading is slower than "
    "computing"
)
STEADY = (
    "; and from the first third on the process opens no more files and threads, and its resident "
    "memory, without the bytes that its tiers and its catalog of the bucket count within their "
    "limits, grows by at most 6 MB for 1,000 answers"
)
_IN_MEMORY = ("memory", "queue", "uploads", "remote")
"""Tiers whose bytes are in the process; those of the bucket are its catalog's."""
MINUTES, CLIENTS, AGENTS, TURNS, TOKENS = 10.0, 12, 24, 4, 8
NAMES = ("qwen3_coder", "glm47", "mistral")
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 512}
POOL_MIB, TIER_MIB, DISK_GB, TTL = 16, 64, 1.0, 3.0
_MIB, _SECONDS = 1 << 20, 120.0
_CANCELLED, _STREAMED = 0.06, 0.5
_BETWEEN = 12.0
_KEYS = ("a-tenant", "another-tenant", "a-third-tenant")
_OPERATOR = "an-operator"
Row = dict[str, Scalar]
Answers = dict[tuple[str, int, int], str]


@dataclass(slots=True)
class Talk:
    """One agent's turns on its client's side, from the beginning again and again under new names.

    `kills` is how often the process had been killed at its last answer.
    """

    model: str
    agent: int
    key: str
    kills: int
    turn: int = 0
    round: int = 0

    @property
    def name(self) -> str:
        """The agent's name for the server."""
        return f"agent-{self.agent}-{self.round}"

    def answered(self, kills: int) -> None:
        """Go on to the next turn, or to the next name."""
        self.kills = kills
        self.turn = (self.turn + 1) % TURNS
        self.round += self.turn == 0


def prompt_of(agent: int, turn: int) -> list[int]:
    """Tokens that begin with those of the turn before."""
    return [(agent * 31 + i * i * 7 + i) % 500 + 20 for i in range(150 + 90 * turn)]


def expected(folder: Path) -> Answers:
    """What mlx-lm's own model in `folder` answers, up to where rounding decides between two tokens:
    the answer begins so."""
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    tokenizer, close = load_tokenizer(str(folder)), most_rounding(model)
    found: Answers = {}
    for agent, turn in itertools.product(range(AGENTS), range(TURNS)):
        sure = list(itertools.takewhile(lambda one: one[1] > close, greedy(model, agent, turn)))
        text = tokenizer.decode([token for token, _ in sure])
        found[folder.name, agent, turn] = text.rstrip("\ufffd")  # half a character
    return found


def greedy(model: Module, agent: int, turn: int) -> Iterator[tuple[int, float]]:
    """Each likeliest token, and by how much its logit is above the next one's."""
    caches = make_prompt_cache(model)
    given = prompt_of(agent, turn)
    for _ in range(TOKENS):
        logits = model(mx.array([given]), cache=caches)[0, -1]
        token = int(mx.argmax(logits))
        second, first = sorted(cast(list[float], mx.topk(logits, 2).tolist()))
        yield token, first - second
        given = [token]


class Refused(Exception):  # noqa: N818 - an answer, not a defect of this program
    """An answer that is none."""


@dataclass
class Soak:
    """A server, what is done to it, and what was seen."""

    server: ServerProcess
    folders: dict[str, Path]
    right: Answers
    ends: float
    seen: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    is_steady: bool = False
    kills: int = 0
    damaged: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    up: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask and disturb until the time is over."""
        self.up.set()
        work = [lambda n=n: self._client(n) for n in range(CLIENTS)]
        threads = [threading.Thread(target=one) for one in (*work, self._disturb)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    # Clients

    def _client(self, number: int) -> None:
        """Talk for some agents of all models."""
        draw, key = random.Random(number), _KEYS[number % len(_KEYS)]
        mine = itertools.product(NAMES, range(number, AGENTS, CLIENTS))
        talks = [Talk(model, agent, key, self.kills) for model, agent in mine]
        while time.monotonic() < self.ends:
            talk, kills = draw.choice(talks), self.kills
            if draw.random() < _CANCELLED:
                self._leave(talk, draw)
            elif self._turn(talk, draw):
                talk.answered(kills)

    def _turn(self, talk: Talk, draw: random.Random) -> bool:
        """Ask once; whether there was an answer."""
        kills, was_damaged = self.kills, talk.model in self.damaged
        self.up.wait()
        try:
            text, cached, why = self._answer(talk, stream=draw.random() < _STREAMED)
        except (OSError, HTTPException, Refused) as error:
            killed = kills != self.kills or not self.up.is_set()
            excused = killed or was_damaged or talk.model in self.damaged
            self._note("excused" if excused else "failed", f"{talk}: {error!r}")
            return False
        self.seen["answers"] += 1
        if not text.startswith(self.right[talk.model, talk.agent, talk.turn]):
            self._note("wrong", f"{talk}: {text!r}")
        if talk.turn and not cached and talk.kills == kills == self.kills:
            self._note("computed" if why == MatchEnd.SLOWER else "lost", f"{talk}: {why}")
        return True

    def _answer(self, talk: Talk, *, stream: bool) -> tuple[str, int, str]:
        """The text, how many tokens were cached and why not more. Raises Refused, or as HTTP."""
        with self._asked(talk, stream=stream) as connection:
            response = connection.getresponse()
            said = response.read().decode()
        if response.status != 200:
            raise Refused(f"{response.status} {said[:300]}")
        lines = [one[6:] for one in said.splitlines() if one.startswith("data: {")]
        events = [json.loads(one) for one in lines] if stream else [json.loads(said)]
        if failed := [one for one in events if "error" in one]:
            raise Refused(str(failed[0])[:300])
        usage = next(one["usage"] for one in reversed(events) if one.get("usage"))
        text = "".join(one["choices"][0]["text"] for one in events if one["choices"])
        lost = usage["semantic"]["lost"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return text, cached, "" if lost is None else lost["end"]

    def _leave(self, talk: Talk, draw: random.Random) -> None:
        """Ask and go away, perhaps while the model is loaded."""
        self.up.wait()
        with suppress(OSError), self._asked(talk, stream=True):
            time.sleep(draw.choice((0.0, 0.02, 0.2)))
        self.seen["cancelled"] += 1

    @contextmanager
    def _asked(self, talk: Talk, *, stream: bool) -> Iterator[HTTPConnection]:
        body = {
            "model": talk.model,
            "prompt": prompt_of(talk.agent, talk.turn),
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        headers = _by(talk.key) | {"Content-Type": "application/json", "X-Agent-ID": talk.name}
        with self._connected() as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            yield connection

    @contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        connection = HTTPConnection("127.0.0.1", self.server.port, timeout=_SECONDS)
        try:
            yield connection
        finally:
            connection.close()

    def _note(self, kind: str, what: str) -> None:
        with self.lock:
            self.seen[kind] += 1
            if kind not in {"excused", "computed"}:
                self.problems.append(f"{kind}: {what}")

    # What is done to the server

    def _disturb(self) -> None:
        draw = random.Random(99)
        worse = () if self.is_steady else (self._damage, self._unload, self._kill)
        order: Iterator[Callable[[random.Random], None]] = itertools.cycle((self._unload, *worse))
        while time.monotonic() + _BETWEEN < self.ends:
            found = self.server.footprint()
            self.samples.append(
                {"answers": self.seen["answers"], **found, "held_bytes": self._held()}
            )
            time.sleep(_BETWEEN)
            next(order)(draw)

    def _held(self) -> int:
        """Bytes that the tiers in the process count; as before if it does not answer."""
        with suppress(OSError, HTTPException), self._connected() as connection:
            connection.request("GET", "/metrics", headers=_by(_OPERATOR))
            text = connection.getresponse().read().decode()
            found = re.findall(r'^semantic_store_bytes\{tier="(\w+)"\} (\S+)$', text, re.MULTILINE)
            return sum(int(float(n_bytes)) for tier, n_bytes in found if tier in _IN_MEMORY)
        return int(str(self.samples[-1]["held_bytes"])) if self.samples else 0

    def _unload(self, draw: random.Random) -> None:
        with suppress(OSError, HTTPException), self._connected() as connection:
            path = f"/v1/models/{draw.choice(NAMES)}/unload"
            connection.request("POST", path, headers=_by(_OPERATOR))
            self.seen["unloaded"] += connection.getresponse().status == 200

    def _damage(self, draw: random.Random) -> None:
        """Have a model's file be half of what it was for some seconds."""
        name = draw.choice(NAMES)
        file = self.folders[name] / "model.safetensors"
        whole = file.read_bytes()
        self.damaged.add(name)
        for content in (whole[: len(whole) // 2], whole):
            new = file.with_suffix(".new")
            new.write_bytes(content)
            new.replace(file)
            time.sleep(4.0)  # those who wait meanwhile have been refused
        self.damaged.discard(name)
        self.seen["damaged"] += 1

    def _kill(self, draw: random.Random) -> None:  # noqa: ARG002
        """Kill the process while it loads a model, and start it again."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not self._is_loading():
            pass
        self.up.clear()
        self.server.kill()
        self.kills += 1
        self.server.start()
        self.up.set()

    def _is_loading(self) -> bool:
        with suppress(OSError, HTTPException), self._connected() as connection:
            connection.request("GET", "/v1/models", headers=_by(_OPERATOR))
            models = json.loads(connection.getresponse().read())["data"]
            found = any(one["state"] == "loading" for one in models)
            self.seen["killed while loading"] += found
            return found
        return False


def _by(key: str) -> dict[str, str]:
    """The header that names who asks."""
    return {"Authorization": f"Bearer {key}"}


def run(minutes: float = MINUTES, *, is_steady: bool = False) -> Result:
    """Requests for so many minutes, and what came of them."""
    parameters: dict[str, Scalar] = {
        "minutes": minutes,
        "is_steady": is_steady,
        "tenants": len(_KEYS),
        "clients": CLIENTS,
        "agents": AGENTS * len(NAMES),
        "pool_mib": POOL_MIB,
        "ttl": TTL,
    }
    name = "swap_soak_steady" if is_steady else "swap_soak"
    started = Run.start(name, QUESTION, model="tiny llamas", parameters=parameters, seed=0)
    with TemporaryDirectory(prefix="semantic-benchmark-") as made:
        folders = {name: write_model(Path(made) / name, name, **SIZES) for name in NAMES}
        right: Answers = {}
        for one in folders.values():
            right |= expected(one)
        server = _server(folders, Path(made))
        server.start()
        ends = time.monotonic() + 60 * minutes
        soak = Soak(server, folders, right, ends, is_steady=is_steady)
        try:
            soak.run()
        finally:
            server.stop()
        loads = server.log.read_text(encoding="utf-8").count("loaded the model ")
        unloads = server.log.read_text(encoding="utf-8").count("unloaded the model ")
    seen = soak.seen
    bad = sum(seen[kind] for kind in ("wrong", "failed", "lost"))
    summary: Row = {
        **{kind: seen[kind] for kind in ("answers", "wrong", "failed", "lost", "computed")},
        **{kind: seen[kind] for kind in ("excused", "cancelled", "unloaded", "damaged")},
        "kills": soak.kills,
        "kills_while_loading": seen["killed while loading"],
        "loads": loads - unloads,
        "unloads": unloads,
        "peak_rss_mb": round(max(float(str(one["rss_bytes"])) for one in soak.samples) / 1e6, 1),
        "problems": "; ".join(soak.problems[:10]),
    }
    if not is_steady:
        passed = bad == 0 and seen["answers"] > 0
        return started.finish(soak.samples, {**summary}, Verdict(CRITERION, 0, bad, passed=passed))
    rows = [{"requests": one["answers"], **one} for one in soak.samples]
    left = summarise([{**one, "rss_bytes": _rest(one)} for one in rows], soak.problems)
    whole = summarise(rows, soak.problems)["mb_per_1000_requests"]
    summary |= {
        "held_mb": round(int(str(rows[-1]["held_bytes"])) / 1e6, 1),
        "whole_mb_per_1000": whole,
    }
    verdict = judge(CRITERION + STEADY, left, is_right=bad == 0)
    return started.finish(soak.samples, {**left, **summary}, verdict)


def _rest(sample: Row) -> int:
    return int(str(sample["rss_bytes"])) - int(str(sample["held_bytes"]))


def _server(folders: dict[str, Path], made: Path) -> ServerProcess:
    """Room for two of the three models, with their weights as the largest."""
    first, *others = folders.values()
    weights = max((one / "model.safetensors").stat().st_size for one in folders.values())
    most = TIER_MIB * _MIB + 2 * (POOL_MIB * _MIB + weights)
    flags = ["--models-gb", str(most / 2**30), "--pool-gb", str(POOL_MIB / 1024)]
    flags += ["--ram-gb", str(TIER_MIB / 1024), "--disk-gb", str(DISK_GB)]
    flags += ["--model-ttl", str(TTL), "--log-level", "info", "--operator-key", _OPERATOR]
    flags += [flag for key in _KEYS for flag in ("--api-key", key)]
    (made / "bucket").mkdir()
    secret = made / "secret"
    secret.write_text(secrets.token_hex(32), encoding="utf-8")
    secret.chmod(0o600)
    flags += ["--remote-store", (made / "bucket").as_uri(), "--fleet-secret-file", str(secret)]
    for one in others:
        flags += ["--allow-model", str(one)]
    return semantic_server(first, made / "server", *flags)


def main() -> int:
    """Run it; 1 when the criterion is missed. Writes a result only with `--output`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--steady", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.nice(10)
    result = run(options.minutes, is_steady=options.steady)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        result.write(options.output / f"{result.id}.json")
    print(json.dumps(result.summary, indent=2))
    return int(not result.verdict.passed)


if __name__ == "__main__":
    raise SystemExit(main())
