"""Runs the zoo: `python -m tests.zoo [row ...]`; all rows take some 12 minutes of one core.

Prints a line for each row. With `--record` the results replace those in `expected.json`, which the
tests compare with, but for rows that are worse, unless `--lower` is given too. With `--together`
the rows are those of `TOGETHER`: agents that begin alike, at once. `--document` writes
`docs/models.md` from what is recorded and computes nothing. Models are computed in a process of
their own, which is started anew if mlx-lm crashes.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.zoo.configurations import rows
from tests.zoo.document import DOCUMENT, document
from tests.zoo.records import Result, read, worse, write
from tests.zoo.trial import TOGETHER, run, together

_INSIDE = "--inside"
"""Given to the process that computes."""


def main(arguments: Sequence[str]) -> int:
    """Run rows; 1 if one is worse than recorded, unless that is recorded now."""
    parser = argparse.ArgumentParser(prog="tests.zoo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="row")
    parser.add_argument("--record", action="store_true", help="write expected.json")
    parser.add_argument("--lower", action="store_true", help="record also what is worse")
    parser.add_argument("--together", action="store_true", help="agents that begin alike, at once")
    parser.add_argument("--document", action="store_true", help="write docs/models.md")
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.document:
        DOCUMENT.write_text(document(read()), encoding="utf-8")
        return 0
    names = given.rows or (list(TOGETHER) if given.together else rows())
    if given.inside:
        logging.disable(logging.WARNING)
        for name in names:
            _say(json.dumps(asdict(_result(name, at_once=given.together))))
        return 0
    recorded = read()
    lost = 0
    for result in _results(names, at_once=given.together):
        found = worse(result, recorded[result.row]) if result.row in recorded else []
        if given.record and (given.lower or not found):
            write([result])
        else:
            lost += bool(found)
        _say(f"{result.row}: {json.dumps(asdict(result))} {'; '.join(found)}")
    return min(lost, 1)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _result(row: str, *, at_once: bool) -> Result:
    with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
        try:
            return (together if at_once else run)(row, Path(scratch) / row)
        except Exception as error:  # noqa: BLE001  the edge of the process: the next row goes on
            return Result(row, refused=f"fails: {type(error).__name__}: {error}")


def _results(names: Sequence[str], *, at_once: bool) -> Iterator[Result]:
    """The rows' results, in order."""
    left = list(names)
    options = ["--together"] if at_once else []
    while left:
        command = [sys.executable, "-m", "tests.zoo", _INSIDE, *options, *left]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                left.pop(0)
                yield Result(**json.loads(line))
        if left:
            yield Result(left.pop(0), refused=f"fails: the process ended with {child.returncode}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
