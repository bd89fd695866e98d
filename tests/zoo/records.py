"""What the zoo gave when it was recorded, which no change may lower. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Final

EXPECTED: Final = Path(__file__).with_name("expected.json")

_FORMS: Final = ("one after another", "mlx-lm's batch", "mixed", "own", "pages")
"""How batches decode, the best last."""


@dataclass
class Result:
    """What a row gave.

    `answers`: for each kind of request "=" if the tokens are mlx-lm's, "~" if they part at a near
    tie, else "X" and what is wrong. `reuse`: percent of the tokens that could be reused, rounded
    down. `form` is how batches decode here; `pages` whether all layers fit into pages where there
    are kernels. `distinct` is how many tokens occur in all answers: few, and the row shows little.
    A row that is `refused` has no more.
    """

    row: str
    caches: str = ""
    form: str = ""
    pages: bool = False
    distinct: int = 0
    refused: str = ""
    answers: dict[str, str] = field(default_factory=dict)
    reuse: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> dict[str, str]:
        """The answers that are wrong."""
        return {column: one for column, one in self.answers.items() if one.startswith("X")}


def read(path: Path = EXPECTED) -> dict[str, Result]:
    """The recorded rows."""
    return {one["row"]: Result(**one) for one in json.loads(path.read_text("utf-8"))["rows"]}


def recorded_versions(path: Path = EXPECTED) -> dict[str, str]:
    """The versions of mlx and mlx_lm that were recorded with."""
    versions = json.loads(path.read_text("utf-8"))["versions"]
    return {name.replace("-", "_"): str(one) for name, one in versions.items()}


def write(results: Iterable[Result], path: Path = EXPECTED) -> None:
    """Record rows beside those that are recorded; a row that was there is replaced."""
    rows = read(path) if path.exists() else {}
    rows |= {one.row: one for one in results}
    recorded = {
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "rows": [asdict(rows[name]) for name in sorted(rows)],
    }
    path.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def worse(found: Result, recorded: Result) -> list[str]:
    """What is worse than recorded; empty if nothing is. Better numbers are no fault."""
    if found.refused:
        return [] if recorded.refused else [f"refused: {found.refused}"]
    lost = [
        f"{column}: {one}" for column, one in found.faults.items() if column not in recorded.faults
    ]
    lost += [f"{name}: was not asked" for name in recorded.answers.keys() - found.answers.keys()]
    lost += _lower(found.reuse, recorded.reuse)
    # Wrong answers of a better form are no gain.
    if not recorded.faults and _rank(found.form) < _rank(recorded.form):
        lost.append(f"decodes {found.form!r}, not {recorded.form!r}")
    if recorded.pages and not found.pages:
        lost.append("does not fit into pages")
    return lost


def _lower(found: Mapping[str, int], recorded: Mapping[str, int]) -> list[str]:
    return [
        f"{column}: {found.get(column, 0)} % reused, not {percent} %"
        for column, percent in recorded.items()
        if found.get(column, 0) < percent
    ]


def _rank(form: str) -> tuple[int, int]:
    """Forms in order; of two mixed ones the one with more layers of ours is better."""
    name, _, layers = form.partition(" ") if form.startswith("mixed") else (form, "", "")
    return _FORMS.index(name) if name else -1, int(layers.partition("/")[0] or 0)
