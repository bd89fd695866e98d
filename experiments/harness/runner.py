"""Runs experiments and keeps what they found: result JSON, plots, numbers in prose, index.

Run: python -m experiments.harness.runner [--list | --check | --render] [ID ...] [--set KEY=VALUE]

A module may also expose PARAMETERS (a mapping of defaults) and PLOTS (a sequence of Plot).
A result is written whatever its verdict: a failed criterion is an answer, not an error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from experiments.harness import report
from experiments.harness.catalogue import (
    Experiment,
    discover,
    index,
    mismatches,
    problems,
    with_index,
)
from experiments.harness.document import ResultError, Scalar
from experiments.harness.environment import ROOT
from experiments.harness.result import Result

if TYPE_CHECKING:
    from experiments.harness.plots import Plot

Parameters = Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Program:
    """The executable side of an experiment, loaded only when it is to run or to draw."""

    run: Callable[[Parameters], Result]
    parameters: Parameters = field(default_factory=dict)
    plots: Sequence[Plot] = ()


def load(experiment: Experiment) -> Program:
    """Import an experiment's module."""
    names = vars(importlib.import_module(experiment.module))
    return Program(
        run=cast("Callable[[Parameters], Result]", names["run"]),
        parameters=cast("Parameters", names.get("PARAMETERS", {})),
        plots=cast("Sequence[Plot]", names.get("PLOTS", ())),
    )


def perform(experiment: Experiment, program: Program, changes: Parameters, output: str) -> Result:
    """Run one experiment and keep its result; refuse one that answers another question."""
    unknown = sorted(set(changes) - set(program.parameters))
    if unknown:
        raise ResultError(f"{experiment.id}: no parameter {unknown[0]!r}")
    result = program.run({**program.parameters, **changes})
    for mismatch in mismatches(experiment, result):
        raise ResultError(f"{experiment.id}: {mismatch}")
    result.write(experiment.folder / output)
    return result


def render(experiment: Experiment, plots: Sequence[Plot], root: Path = ROOT) -> None:
    """Draw the plots and fill the report's numbers from the kept result."""
    kept = experiment.folder / "result.json"
    if plots and kept.exists():
        if find_spec("matplotlib") is None:
            print(f"{experiment.id}: no plots, matplotlib is not installed", file=sys.stderr)
        else:
            from experiments.harness.plots import draw

            draw(kept, plots)
    if experiment.report.exists():
        report.update(experiment.report, root)


def refresh_index(root: Path = ROOT) -> None:
    """Rewrite the table of experiments/README.md."""
    path = root / "experiments" / "README.md"
    text = with_index(path.read_text(encoding="utf-8"), discover(root))
    path.write_text(text, encoding="utf-8", newline="\n")


def check(root: Path = ROOT) -> list[str]:
    """What is out of date or inconsistent, one line each; empty when all is well."""
    experiments = discover(root)
    found = [line for experiment in experiments for line in problems(experiment)]
    found += [
        line
        for experiment in experiments
        if experiment.report.exists()
        for line in report.differences(experiment.report, root)
    ]
    text = (root / "experiments" / "README.md").read_text(encoding="utf-8")
    if with_index(text, experiments) != text:
        found.append("experiments/README.md: the index is out of date")
    return found


def select(experiments: Sequence[Experiment], wanted: Sequence[str]) -> list[Experiment]:
    """The experiments named by id or folder, or all."""
    known = {name: item for item in experiments for name in (item.id, item.folder.name)}
    for name in wanted:
        if name not in known:
            raise ResultError(f"no experiment {name!r}; there are: {', '.join(sorted(known))}")
    return [known[name] for name in wanted] if wanted else list(experiments)


def setting(text: str) -> tuple[str, Scalar]:
    """`key=value`; the value is read as JSON where that gives a scalar, else as a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError:
        return key, value
    return key, parsed if isinstance(parsed, bool | int | float | str) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments named, or all, and keep what they find."""
    options = _parser().parse_args(arguments)
    try:
        return _act(options)
    except (OSError, ResultError) as error:
        print(f"runner: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="runner", description=main.__doc__)
    parser.add_argument("ids", nargs="*", metavar="ID")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--list", action="store_true", help="show the index; run nothing")
    mode.add_argument("--check", action="store_true", help="fail if anything kept is out of date")
    mode.add_argument("--render", action="store_true", help="redo plots and numbers; run nothing")
    parser.add_argument("--set", action="append", type=setting, default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", default="result.json", metavar="result[-NAME].json")
    return parser


def _act(options: argparse.Namespace) -> int:
    if options.check:
        found = check()
        print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
        return 1 if found else 0
    experiments = discover()
    if options.list:
        print(index(experiments))
        return 0
    for experiment in select(experiments, options.ids):
        _one(experiment, options)
    refresh_index()
    return 0


def _one(experiment: Experiment, options: argparse.Namespace) -> None:
    program = load(experiment)
    if not options.render:
        print(f"{experiment.id}: {experiment.question}", flush=True)
        verdict = perform(experiment, program, dict(options.set), options.output).verdict
        word = "passed" if verdict.passed else "failed"
        print(f"{experiment.id}: {word} - {verdict.criterion} (observed: {verdict.observed})")
    render(experiment, program.plots)


if __name__ == "__main__":
    sys.exit(main())
