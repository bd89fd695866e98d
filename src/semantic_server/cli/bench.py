"""`semantic bench`: measures a model on this machine through a private server, then
`mlx_lm.server` with the same prompts. The file that it writes names no person, machine or path."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from semantic.cli.edge import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, print_notice
from semantic.cli.options import option
from semantic.cli.report import Json, columns, show_seconds
from semantic.composition.engine_settings import DEFAULT_MODEL, MODEL
from semantic.domain.errors import InvalidRequestError, OperatorError, SemanticError

if TYPE_CHECKING:
    from semantic_server.clients.private_server import Message, PrivateServer, TimedAnswer

OURS, THEIRS = "semantic", "mlx_lm.server"
_PROGRAM: Final = (sys.executable, "-m", "semantic")
_MACHINE: Final = ("semantic", "python", "platform", "mlx", "mlx-lm", "device", "memory", "blas")
_CACHES: Final = ("ragged caches", "caches", "exact batch", "drafts", "8 bits", "bytes")
"""The findings of `semantic doctor` about a machine and about a model's caches."""
_MODEL: Final = ("model_type", "commit", "weights_bytes", "token_bytes", "fixed_bytes")
_OUR_SHARE: Final = 0.5  # of the time
_STREAMS: Final = (1, 4, 8)
_AGENTS, _TURNS = 4, 5
_LONGEST, _SHORTEST = 131_072, 256  # tokens of a prompt
_DECODED: Final = (16, 256)
_ANSWER: Final = 24  # tokens, where only the first counts
_PREFILLS: Final = 20
"""The time of all measurements, in prefills of the longest prompt."""
_BEGUN: Final = 3
"""The pieces of a stream that decodes."""
_SETTLED_SECONDS: Final = 1.0
_INTERRUPTED: Final = "Ctrl-C ended the command early"


class Sizes(NamedTuple):
    """The tokens of the longest prompt, of an answer, of one that outlasts a prefill, and of a line
    of a prompt."""

    longest: int
    answer: int
    outlasting: int
    line: float


@dataclass(slots=True)
class Figures:
    """Each figure's unit ("tokens/s", "s" or "x") and its values by server; facts about the caches;
    notes, and failures of exactness."""

    units: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    caches: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def put(self, server: str, name: str, unit: str, value: float) -> None:
        self.units[name] = unit
        self.values.setdefault(name, {})[server] = value
        print_notice(f"{server}: {name}: {_shown(value, unit)}")

    def ratio(self, name: str) -> float | None:
        """Return how many times as good our figure is as theirs."""
        ours, theirs = (self.values[name].get(one) for one in (OURS, THEIRS))
        if not ours or not theirs or self.units[name] == "x":
            return None
        return theirs / ours if self.units[name] == "s" else ours / theirs

    def as_json(self) -> Json:
        figures = [
            {"name": name, "unit": unit, **self.values[name], "ratio": self.ratio(name)}
            for name, unit in self.units.items()
        ]
        found = {"figures": figures, "caches": self.caches}
        return {**found, "notes": self.notes, "failures": self.failures}

    def table(self) -> str:
        """Return the report, with the last ratio of a line in bold."""
        servers = dict.fromkeys(one for values in self.values.values() for one in values)
        rows = [["", *servers]]
        for name, unit in self.units.items():
            values = (_shown(self.values[name].get(one), unit) for one in servers)
            rows.append([name, *values, _shown(self.ratio(name), "x")])
        lines = (line.rpartition("  ") for line in columns(rows))
        bold = [
            first + gap + typer.style(last, bold=last.endswith(" x")) for first, gap, last in lines
        ]
        facts = columns(list(self.caches.items()))
        failures = (f"FAILED: {one}" for one in self.failures)
        return "\n".join((*bold, "", *facts, *self.notes, *failures))


def bench(
    model: Annotated[str, option(MODEL)] = DEFAULT_MODEL,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=60, help="End after this time; lengths follow it.")
    ] = 10,
    quick: Annotated[bool, typer.Option("--quick", help="The same as --minutes 1.")] = False,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Leave mlx_lm.server out.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="The JSON file. Default: semantic-bench-DATE.json.", show_default=False),
    ] = None,
) -> None:
    """Measure a model on this machine, beside mlx_lm.server, in at most ten minutes.

    Starts a server with a store of its own, then mlx_lm.server with the same prompts: decode,
    prefill, turns of several agents, a long prompt that joins others, and a restart after kill -9.
    Prints a table and writes a JSON file that names the chip and the versions, but no path, user or
    host. Ctrl-C ends it and keeps the figures so far. Exits with 1 if an answer depends on the
    cache.
    """
    from semantic.composition.named_models import find_model, model_of
    from semantic_server.clients.private_server import PrivateServer

    begun, date = time.monotonic(), time.strftime("%Y-%m-%d")
    minutes = 1 if quick else minutes
    path = output or Path(f"semantic-bench-{date}.json")
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidRequestError(f"--output must be a file in a folder that exists, got {path}")
    figures, machine, facts = Figures(), dict[str, str](), Json(minutes=minutes)
    # Before the import of MLX, which moves this process' temporary folder.
    with closing(PrivateServer()) as server:
        folder = find_model(model_of(model))
        facts |= {"date": date, "model": _facts(model)}
        server.until = begun + 60 * minutes * (1 if no_baseline else _OUR_SHARE)
        try:
            with suppress(TimeoutError):
                machine |= _examined(server, folder, figures)
            sizes = Measures(OURS, server, figures, _serve(folder, server)).take()
            if sizes is not None and not no_baseline:
                server.until = begun + 60 * minutes
                Measures(THEIRS, server, figures, _baseline(folder, machine)).take(sizes)
        except KeyboardInterrupt:
            figures.notes.append(_INTERRUPTED)
    typer.echo(figures.table())
    _write(path, {**facts, "machine": machine, **figures.as_json()})
    if _INTERRUPTED in figures.notes:
        raise typer.Exit(EXIT_INTERRUPTED)
    if figures.failures:
        raise typer.Exit(EXIT_CHECK_FAILED)


def _facts(model: str) -> Json:
    """Return what a model is. A folder's name may be private: its architecture stands for it."""
    from semantic.cli.models.facts import facts_of, find_place

    place = find_place(model)
    if place is None:
        return {}
    known = facts_of(place, {}, None).as_json()
    name = known.get("model_type") if place.source == "folder" else place.name
    return {"name": name, **{one: known[one] for one in _MODEL if one in known}}


def _examined(server: PrivateServer, folder: Path, figures: Figures) -> dict[str, str]:
    """Return what `semantic doctor` finds about the machine; note what it finds about caches."""
    import platform

    doctor = (*_PROGRAM, "doctor", "--no-store", "--json", "--model", str(folder))
    printed = (line for line in server.run(doctor) if line.startswith("{"))
    findings = json.loads(next(printed, '{"findings": []}'))["findings"]
    texts = {one["name"]: one["detail"] for one in findings}
    figures.caches |= {name: texts[name] for name in _CACHES if name in texts}
    release = platform.mac_ver()[0] or platform.release().partition("-")[0]
    return {"release": release, **{name: texts[name] for name in _MACHINE if name in texts}}


def _serve(folder: Path, server: PrivateServer) -> Sequence[str]:
    settings = server.folder / "config.toml"
    settings.touch()
    own = ("--config", str(settings), "--store", str(server.folder / "store"))
    return (*_PROGRAM, "serve", "--model", str(folder), *own, "--log-level", "warning")


def _baseline(folder: Path, machine: Mapping[str, str]) -> Sequence[str]:
    """Return the command of mlx_lm.server, with the BLAS library that this program uses."""
    blas = ("env", "LD_PRELOAD=libopenblas.so.0") * (machine.get("blas") == "openblas")
    command = (sys.executable, "-m", "mlx_lm.server", "--model", str(folder))
    return (*blas, *command, "--log-level", "WARNING")


@dataclass(frozen=True, slots=True)
class Measures:
    """The measurements of one server, which `command` starts."""

    name: str
    server: PrivateServer
    figures: Figures
    command: Sequence[str]

    def take(self, sizes: Sizes | None = None) -> Sizes | None:
        """Measure all until the end of the time, with lengths that fit. Return them, or None before
        any. Raises OperatorError if our server fails; an error of the other one is a note."""
        try:
            begun = time.monotonic()
            self._start()
            sizes = sizes or self._sized(time.monotonic() - begun)
            for measure in (self._decode, self._prefill, self._turns, self._join, self._restore):
                measure(sizes)
        except TimeoutError:
            self.figures.notes.append(f"{self.name}: its time ended early")
        except SemanticError as error:
            if self.name == OURS:
                raise
            self.figures.notes.append(f"{self.name} failed, so its figures end there")
            print_notice(error)
        return sizes

    def _start(self) -> None:
        self.server.start(self.command, "/ready" if self.name == OURS else "/health")
        self._ask(_text(1, 100, 10), 4)

    def _sized(self, start_seconds: float) -> Sizes:
        from semantic_server.clients.coding_agents import find_server

        context = find_server(self.server.url).context_tokens
        n_lines = 60
        told = self._ask(_text(2, n_lines, 1), 32)
        speed, rate = told.prompt_tokens / told.first, max(told.rate, 1.0)
        seconds = max(self.server.until - time.monotonic() - start_seconds, 0)
        longest = int(min(context * 3 / 4, _LONGEST, speed * seconds / _PREFILLS))
        longest = max(longest // _SHORTEST, 1) * _SHORTEST
        outlasting = int(min(context / 4, 64 + 4 * rate * longest / speed))
        answer = int(min(max(rate * seconds / 60, _DECODED[0]), _DECODED[1], context / 4))
        return Sizes(longest, answer, outlasting, told.prompt_tokens / n_lines)

    def _decode(self, sizes: Sizes) -> None:
        for n in _STREAMS:
            begun = [self.server.begin(_story(10 * n + i), sizes.answer) for i in range(n)]
            rate = sum(self.server.finish(one).rate for one in begun)
            self._put(f"decode, {n} stream{'s' * (n > 1)}", "tokens/s", rate)

    def _prefill(self, sizes: Sizes) -> None:
        for i, length in enumerate((sizes.longest // 16, sizes.longest // 4, sizes.longest)):
            one = self._ask(_text(200 + i, length, sizes.line), _ANSWER)
            speed = (one.prompt_tokens - one.cached_tokens) / one.first
            self._put(f"prefill, {length:,} tokens", "tokens/s", speed)

    def _turns(self, sizes: Sizes) -> None:
        length = sizes.longest // (_AGENTS * _TURNS)
        agents: list[list[Message]] = [[] for _ in range(_AGENTS)]
        waits = []
        for turn in range(_TURNS):
            firsts = []
            for i, said in enumerate(agents):
                said.extend(_text(300 + 10 * i + turn, length, sizes.line))
                told = self._ask(said, _ANSWER, f"agent {i}")
                said.append({"role": "assistant", "content": told.text})
                firsts.append(told.first)
            waits.append(sorted(firsts)[_AGENTS // 2])
        self._put(f"turn 2 of {_AGENTS} agents, first token", "s", waits[1])
        self._put(f"turn {_TURNS} of {_AGENTS} agents, first token", "s", waits[-1])
        self._put(f"turn {_TURNS} over turn 2", "x", waits[-1] / waits[1])

    def _restore(self, sizes: Sizes) -> None:
        said, name = _text(400, sizes.longest, sizes.line), f"{sizes.longest:,} tokens"
        cold = self._ask(said, _ANSWER, "long")
        self._put(f"{name} cold, first token", "s", cold.first)
        for way in ("from memory", "after kill -9"):
            if way != "from memory":
                self._settle()
                self.server.kill()
                self._start()
            again = self._ask(said, _ANSWER, "long")
            self._put(f"{name} {way}, first token", "s", again.first)
            self._put(f"cold over {way}", "x", cold.first / again.first)
            if self.name == OURS and again.text != cold.text:
                self.figures.failures.append(f"the answer {way} differs from the cold one")

    def _settle(self) -> None:
        """Wait until the store has written all: for a while its files stay the same."""
        before, since = -1, time.monotonic()
        while time.monotonic() < since + _SETTLED_SECONDS:
            found = sum(1 for _ in self.server.folder.rglob("*"))
            if found != before:
                before, since = found, time.monotonic()
            self.server.pause()

    def _join(self, sizes: Sizes) -> None:
        running = [
            self.server.begin(_story(500 + i), sizes.outlasting) for i in range(_STREAMS[-1] - 1)
        ]
        while not all(len(one.pieces) >= _BEGUN or one.ended for one in running):
            self.server.pause()
        length = sizes.longest // 2
        joined = self._ask(_text(600, length, sizes.line), _ANSWER)
        first = joined.sent + joined.first
        for one in running:
            one.is_left = True
            self.server.finish(one)
        pairs = (pair for one in running for pair in pairwise(one.pieces))
        gaps = [b - a for a, b in pairs if b > joined.sent and a < first]
        if gaps:
            self._put(f"{length:,} tokens join 7 streams, longest gap", "s", max(gaps))
        self._put(f"{length:,} tokens join 7 streams, first token", "s", joined.first)

    def _put(self, name: str, unit: str, value: float) -> None:
        self.figures.put(self.name, name, unit, value)

    def _ask(self, said: Sequence[Message], n_tokens: int, agent: str = "") -> TimedAnswer:
        return self.server.finish(self.server.begin(said, n_tokens, agent))


def _story(seed: int) -> list[Message]:
    return [{"role": "user", "content": f"Tell me a long story about a fox and {seed} trains."}]


def _text(seed: int, n_tokens: int, line: float) -> list[Message]:
    """Return a text of about `n_tokens`, in lines of `line` tokens. No two seeds share a prefix."""
    numbers = range(max(int(n_tokens / line), 1))
    text = "\n".join(f"{seed + i} has {i * i * seed % 9973} words." for i in numbers)
    return [{"role": "user", "content": text}]


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "" if unit == "x" else "-"
    return show_seconds(value) if unit == "s" else f"{value:,.1f} {unit}"


def _write(path: Path, document: Json) -> None:
    try:
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        reason = f"cannot write {path}: {error.strerror}; name another file with --output"
        raise OperatorError(reason) from error
    print_notice(f"written: {path}")
