"""The record of one run: schema `semantic.result/1`, checked whenever it is read or written.

A result holds raw samples beside their summary, so that the summary can be recomputed.
It knows nothing of how the numbers were measured or of how they are shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path

from experiments.harness.document import Document, Json, ResultError, Scalar
from experiments.harness.environment import Machine

SCHEMA = "semantic.result/1"
COMMIT = re.compile(r"[0-9a-f]{7,64}|unknown")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was demanded before the run, what was seen, and whether that is enough."""

    criterion: str
    threshold: Scalar
    observed: Scalar
    passed: bool


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one experiment or benchmark. `dirty` means `commit` is not the whole truth."""

    id: str
    question: str
    commit: str
    dirty: bool
    machine: Machine
    versions: Mapping[str, str]
    model: str
    parameters: Mapping[str, Scalar]
    seed: int
    started_at: str
    samples: tuple[Mapping[str, Scalar], ...]
    summary: Mapping[str, Json]
    verdict: Verdict
    schema: str = SCHEMA

    def validate(self) -> None:
        """Raise ResultError at the first field that breaks the schema."""
        self.to_json()

    def to_json(self) -> str:
        """The same result always becomes the same text, one newline at its end.

        Fields of samples and of the summary keep their order, which is the order of a table's
        columns in a report.
        """
        fields_in_order = asdict(self)
        for unordered in ("parameters", "versions"):
            fields_in_order[unordered] = dict(sorted(fields_in_order[unordered].items()))
        try:
            text = json.dumps(fields_in_order, indent=2, ensure_ascii=False)
        except TypeError as error:
            raise ResultError(f"a field is not JSON: {error}") from error
        parse(json.loads(text))
        return text + "\n"

    def write(self, path: Path) -> None:
        """Write the checked result to `path`; nothing is written if it is not valid."""
        path.write_text(self.to_json(), encoding="utf-8", newline="\n")


def read(path: Path) -> Result:
    """The result kept in `path`, checked."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ResultError(f"{path.name}: {error}") from error


def parse(value: Json) -> Result:
    """The result in a JSON document. Raises ResultError if it violates the schema."""
    document = Document(value)
    _check_schema(document)
    return Result(
        id=document.text("id"),
        question=document.text("question"),
        commit=_commit(document),
        dirty=document.flag("dirty"),
        machine=_machine(document.child("machine")),
        versions=_versions(document),
        model=document.text("model"),
        parameters=document.scalars("parameters"),
        seed=document.integer("seed"),
        started_at=_time(document, "started_at"),
        samples=document.rows("samples"),
        summary=document.tree("summary"),
        verdict=_verdict(document.child("verdict")),
    )


def _check_schema(document: Document) -> None:
    schema = document.text("schema")
    if schema != SCHEMA:
        raise ResultError(f"schema: expected {SCHEMA!r}, got {schema!r}")
    document.only(field.name for field in fields(Result))


def _commit(document: Document) -> str:
    commit = document.text("commit")
    if not COMMIT.fullmatch(commit):
        raise ResultError(f"commit: expected a hash or 'unknown', got {commit!r}")
    return commit


def _machine(document: Document) -> Machine:
    document.only(field.name for field in fields(Machine))
    return Machine(
        chip=document.text("chip"),
        cores=document.integer("cores"),
        memory_bytes=document.integer("memory_bytes"),
        os=document.text("os"),
        accelerator=document.optional_text("accelerator"),
    )


def _versions(document: Document) -> dict[str, str]:
    versions = document.texts("versions")
    if "python" not in versions:
        raise ResultError("versions.python: missing")
    return versions


def _time(document: Document, key: str) -> str:
    text = document.text(key)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ResultError(f"{key}: expected an ISO 8601 time, got {text!r}") from error
    if moment.utcoffset() is None:
        raise ResultError(f"{key}: {text!r} does not say its time zone")
    return text


def _verdict(document: Document) -> Verdict:
    document.only(field.name for field in fields(Verdict))
    return Verdict(
        criterion=document.text("criterion"),
        threshold=document.scalar("threshold"),
        observed=document.scalar("observed"),
        passed=document.flag("passed"),
    )
