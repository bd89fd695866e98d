"""Fills the numbers in Markdown files from result files, and checks that they are equal.

A number is the content of a region: the first word names a result (a JSON path from the
repository root, or an experiment's folder), the second a key path in it, the third may be a
format specification:

    `<!-- result:exp_001_example summary.p95_ms .1f -->4.2<!-- /result -->`

A list of objects becomes a table, an object a table of its fields. Regions inside code are
left alone. Without FILE every Markdown file of the root, `docs`, `experiments` and
`benchmarks` is processed.

Run: python -m experiments.harness.report [--check] [FILE ...]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.harness.document import Json, ResultError, is_scalar
from experiments.harness.environment import ROOT

REGION = re.compile(
    r"<!-- result:(?P<name>\S+) (?P<keys>\S+)(?: (?P<spec>\S+))? -->"
    r"(?P<body>.*?)<!-- /result -->",
    re.DOTALL,
)
MARK = re.compile(r"<!--\s*/?result\b.*?-->", re.DOTALL)
CODE = re.compile(
    r"^(?P<fence>```+|~~~+).*?^(?P=fence)|(?P<ticks>`+)[^`](?:(?!\n\n).)*?(?P=ticks)",
    re.DOTALL | re.MULTILINE,
)


def render(text: str, root: Path = ROOT) -> str:
    """Return `text` with every region filled from its result; nothing else changes.

    Raises ResultError for a malformed region and for one without a value.
    """
    code = [match.span() for match in CODE.finditer(text)]
    regions = [match for match in REGION.finditer(text) if not _inside(match, code)]
    marks = [match for match in MARK.finditer(text) if not _inside(match, code)]
    if len(marks) != 2 * len(regions):
        raise ResultError(f"{_first_stray(marks, regions)}: mark without its partner, or malformed")
    parts: list[str] = []
    end = 0
    for region in regions:
        parts += [text[end : region.start("body")], _value(region, root)]
        end = region.end("body")
    return "".join([*parts, text[end:]])


def update(path: Path, root: Path = ROOT) -> bool:
    """Fill the regions of a file; return whether the file changed."""
    before = path.read_text(encoding="utf-8")
    after = render(before, root)
    if after != before:
        path.write_text(after, encoding="utf-8", newline="\n")
    return after != before


def differences(path: Path, root: Path = ROOT) -> list[str]:
    """Return one message per line of the file that differs from its results."""
    before = path.read_text(encoding="utf-8")
    after = render(before, root)
    if before == after:
        return []
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    name = _shown(path, root)
    found = [
        f"{name}:{number}: has {old.strip()!r}, its result says {new.strip()!r}"
        for number, (old, new) in enumerate(pairs, start=1)
        if old != new
    ]
    return found or [f"{name}: its result has more or fewer lines"]


def documents(root: Path = ROOT) -> list[Path]:
    """Return every Markdown file that may contain regions, sorted."""
    folders = ("docs", "experiments", "benchmarks")
    nested = (path for folder in folders for path in (root / folder).rglob("*.md"))
    return sorted([*root.glob("*.md"), *nested])


def lookup(name: str, keys: str, root: Path = ROOT) -> Json:
    """Return the value at a dotted key path of a result; list entries are addressed by number.

    Raises ResultError when there is no such result or key.
    """
    path = root / name if name.endswith(".json") else root / "experiments" / name / "result.json"
    if not path.is_file():
        raise ResultError(f"result:{name}: no such result")
    value: Json = json.loads(path.read_text(encoding="utf-8"))
    for key in keys.split("."):
        value = _step(value, key, f"result:{name} {keys}")
    return value


def show(value: Json, spec: str = "") -> str:
    """Return a value as text: a scalar formatted by `spec`, a list or object as a table."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_scalar(value):
        return format(value, spec) if value is not None else "none"
    if isinstance(value, dict):
        return _table(["", ""], ([key, show(inner, spec)] for key, inner in value.items()))
    if isinstance(value, list):
        return _rows(value, spec)
    raise ResultError(f"cannot show {value!r}")


def _rows(rows: Sequence[Json], spec: str) -> str:
    records = [row for row in rows if isinstance(row, dict)]
    if not records or len(records) != len(rows):
        return ", ".join(show(row, spec) for row in rows)
    columns = list(records[0])
    cells = ([_cell(record.get(column), spec) for column in columns] for record in records)
    return _table(columns, cells)


def _cell(value: Json, spec: str) -> str:
    return show(value, spec if isinstance(value, float) else "")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _value(region: re.Match[str], root: Path) -> str:
    name, keys, spec = region["name"], region["keys"], region["spec"] or ""
    value = lookup(name, keys, root)
    try:
        return show(value, spec)
    except ValueError as error:
        raise ResultError(f"result:{name} {keys}: {error}") from error


def _step(value: Json, key: str, place: str) -> Json:
    if isinstance(value, dict) and key in value:
        return value[key]
    if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
        return value[int(key)]
    raise ResultError(f"{place}: nothing at {key!r}")


def _inside(match: re.Match[str], spans: Sequence[tuple[int, int]]) -> bool:
    return any(start <= match.start() < end for start, end in spans)


def _first_stray(marks: Sequence[re.Match[str]], regions: Sequence[re.Match[str]]) -> str:
    edges = {region.start() for region in regions}
    ends = {region.end() for region in regions}
    strays = (mark[0] for mark in marks if mark.start() not in edges and mark.end() not in ends)
    return next(strays, "a region inside a region")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the regions of the files given, or of all; with --check only report differences."""
    parser = argparse.ArgumentParser(prog="report", description=main.__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="change nothing; fail on a difference")
    options = parser.parse_args(arguments)
    paths = [path.resolve() for path in options.files] or documents()
    try:
        return _check(paths) if options.check else _fill(paths)
    except (OSError, ResultError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1


def _check(paths: Iterable[Path]) -> int:
    found = [line for path in paths for line in differences(path)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


def _fill(paths: Iterable[Path]) -> int:
    for path in paths:
        if update(path):
            print(f"filled {_shown(path, ROOT)}")
    return 0


def _shown(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name


if __name__ == "__main__":
    sys.exit(main())
