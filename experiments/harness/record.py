"""Turns measurements into a Result by adding machine, versions and commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from experiments.harness import environment
from experiments.harness.document import Json, Scalar
from experiments.harness.result import Result, Verdict


@dataclass(frozen=True, slots=True)
class Run:
    """A run from its first moment: create it before measuring, then hand it what was found."""

    id: str
    question: str
    model: str
    parameters: Mapping[str, Scalar]
    seed: int
    started_at: str
    code: environment.Commit

    @classmethod
    def start(
        cls, name: str, question: str, *, model: str, parameters: Mapping[str, Scalar], seed: int
    ) -> Run:
        """Note the time and the state of the code, which a long run could otherwise outlive."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(name, question, model, dict(parameters), seed, now, environment.commit())

    def finish(
        self, samples: Iterable[Mapping[str, Scalar]], summary: Mapping[str, Json], verdict: Verdict
    ) -> Result:
        """The complete, checked result."""
        result = Result(
            id=self.id,
            question=self.question,
            commit=self.code.commit,
            dirty=self.code.dirty,
            machine=environment.machine(),
            versions=environment.versions(),
            model=self.model,
            parameters=self.parameters,
            seed=self.seed,
            started_at=self.started_at,
            samples=tuple(samples),
            summary=summary,
            verdict=verdict,
        )
        result.validate()
        return result
