"""Finds the experiments and keeps their index. It reads modules; it never executes one.

An experiment is a folder `exp_*` whose `run.py` assigns the constants ID, QUESTION and CRITERION
as plain literals and defines `run(parameters) -> Result`. Its report is the folder's README.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.harness.document import ResultError
from experiments.harness.environment import ROOT
from experiments.harness.result import Result, read

INDEX_OPEN = "<!-- index -->"
INDEX_CLOSE = "<!-- /index -->"
CONSTANTS = ("ID", "QUESTION", "CRITERION")


@dataclass(frozen=True, slots=True)
class Experiment:
    """What an experiment promised before it ran, and where its answers lie."""

    folder: Path
    id: str
    question: str
    criterion: str

    @property
    def module(self) -> str:
        """The dotted name under which the repository root can import it."""
        return f"{self.folder.parent.name}.{self.folder.name}.run"

    @property
    def report(self) -> Path:
        """The prose: method, verdict, limits."""
        return self.folder / "README.md"

    @property
    def results(self) -> list[Path]:
        """Every kept result, the one of the verdict first (`result.json`, then `result-*.json`)."""
        found = [*self.folder.glob("result.json"), *self.folder.glob("result-*.json")]
        return sorted(found, key=lambda path: (len(path.name), path))

    @property
    def verdict(self) -> str:
        """One word for the index: passed, failed or "not run"."""
        path = self.folder / "result.json"
        if not path.exists():
            return "not run"
        return "passed" if read(path).verdict.passed else "failed"


def discover(root: Path = ROOT) -> list[Experiment]:
    """All experiments, by folder name; two with one id are an error."""
    found = [_read(path) for path in sorted((root / "experiments").glob("exp_*/run.py"))]
    by_id: dict[str, Experiment] = {}
    for experiment in found:
        other = by_id.setdefault(experiment.id, experiment)
        if other is not experiment:
            folders = f"{other.folder.name} and {experiment.folder.name}"
            raise ResultError(f"{folders} have the same id {experiment.id}")
    return found


def problems(experiment: Experiment) -> list[str]:
    """What of the experiment and its kept results does not fit together, one line each."""
    if not experiment.report.exists():
        return [f"{experiment.folder.name}: its report README.md is missing"]
    return [
        f"{experiment.folder.name}/{path.name}: {mismatch}"
        for path in experiment.results
        for mismatch in mismatches(experiment, read(path))
    ]


def mismatches(experiment: Experiment, result: Result) -> Iterator[str]:
    """Where a result answers another question than the one asked, or a moved criterion."""
    asked = {
        "id": (experiment.id, result.id),
        "question": (experiment.question, result.question),
        "criterion": (experiment.criterion, result.verdict.criterion),
    }
    for name, (expected, actual) in asked.items():
        if expected != actual:
            yield f"{name} is {actual!r}, run.py says {expected!r}"


def index(experiments: list[Experiment]) -> str:
    """The table of all questions and their answers."""
    rows = [
        f"| {item.id} | {item.question} | {item.verdict} | [report]({item.folder.name}/README.md) |"
        for item in experiments
    ]
    return "\n".join(["| id | question | verdict | report |", "|---|---|---|---|", *rows])


def with_index(text: str, experiments: list[Experiment]) -> str:
    """The text with the table between its two index marks replaced by the present one."""
    before, opened, rest = text.partition(f"{INDEX_OPEN}\n")
    _, closed, after = rest.partition(INDEX_CLOSE)
    if not opened or not closed:
        raise ResultError(f"experiments/README.md: needs {INDEX_OPEN} and {INDEX_CLOSE}")
    return f"{before}{opened}{index(experiments)}\n{closed}{after}"


def _read(path: Path) -> Experiment:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=path.name)
    constants = dict(_constants(tree))
    for name in CONSTANTS:
        if not constants.get(name, "").strip():
            raise ResultError(f"{path.parent.name}/run.py: {name} must be a literal string")
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        raise ResultError(f"{path.parent.name}/run.py: run(parameters) is missing")
    return Experiment(path.parent, *(constants[name] for name in CONSTANTS))


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)))
            ):
                yield name, text
            case _:
                pass
