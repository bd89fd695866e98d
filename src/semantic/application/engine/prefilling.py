"""Computes prompts chunk by chunk between decode steps: whose is next, and how much of it.

Knows requests and their sequences; no pool, no queue, and not what becomes of a failed request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.application.engine.recent_concurrency import RecentConcurrency
from semantic.application.engine.scheduler import PrefillTurns
from semantic.application.engine.sequences import Sequences
from semantic.application.request import Phase, Request
from semantic.domain.errors import BackendError
from semantic.domain.value_objects import PrefillEvent
from semantic.ports.outbound import Clock


@dataclass(slots=True)
class Chunks:
    """What one step computed of prompts, and whose computation failed for what reason."""

    n_tokens: int = 0
    events: list[PrefillEvent] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)


class Prefilling:
    """Gives prompts their chunks. Used by the stepping thread alone."""

    def __init__(self, sequences: Sequences, budget: PrefillBudget, clock: Clock) -> None:
        self._sequences = sequences
        self._budget = budget
        self._clock = clock
        self._turns: PrefillTurns = PrefillTurns()
        self._company = RecentConcurrency()

    def step(self, running: Sequence[Request], n_about: int, *, decoding: bool) -> Chunks:
        """Compute chunks of prompts of `running` up to the budget.

        `n_about` is how many requests run or wait; `decoding` says whether agents decode in the
        same step. Where a prompt has been completed, no long one holds its first token up.
        """
        chunks: Chunks = Chunks()
        company = self._company.observe(n_about, self._clock())
        if any(request.silent for request in running):
            return chunks
        while True:
            request = self._turns.next([one for one in running if self._is_ready(one, chunks)])
            if request is None:
                return chunks
            wanted = chunks.n_tokens + request.to_prefill
            most = self._budget.next_chunk(wanted, decoding=decoding, company=company)
            left = most - chunks.n_tokens
            is_last = left >= request.to_prefill
            if left <= 0 or (not is_last and any(one.silent for one in running)):
                return chunks
            self._compute(request, left, chunks)

    def _is_ready(self, request: Request, chunks: Chunks) -> bool:
        return (
            request.phase is Phase.PREFILL
            and all(request is not failed for failed, _ in chunks.failed)
            and self._sequences.may_prefill(request)
        )

    def _compute(self, request: Request, limit: int, chunks: Chunks) -> None:
        begin = self._clock()
        try:
            n_tokens = self._sequences.prefill(request, limit)
        except BackendError as error:
            # Its text only: the error's frames hold what the failed sequence had in memory.
            chunks.failed.append((request, str(error)))
            return
        chunks.n_tokens += n_tokens
        self._turns.give(request, n_tokens)
        request.archived.prefill_seconds += self._clock() - begin
        done, total = request.computed, request.n_tokens - 1
        chunks.events.append(PrefillEvent(request.uid, request.agent_id, done, total))
