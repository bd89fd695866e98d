"""GenerationEnginePort: the engine's interface for the command line, a server or a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from semantic.domain.entities import AgentBlocks
from semantic.domain.value_objects import (
    CompletedGeneration,
    PrefillEvent,
    SamplingParams,
    TokenEvent,
)

EngineEvent = TokenEvent | PrefillEvent | CompletedGeneration


class GenerationEnginePort(Protocol):
    """Generates for many agents in one batch.

    `submit` and `cancel` may be called from any thread; `step` and `step_once` from one.
    """

    def submit(
        self,
        agent_id: str,
        prompt: str | Sequence[int],
        cache: AgentBlocks | None = None,
        max_tokens: int = 256,
        *,
        sampling: SamplingParams | None = None,
        append: bool = False,
        tenant: str = "",
        note: str = "",
        keep: bool = True,
    ) -> str:
        """Queue a request and return its uid.

        `prompt` is the whole prompt, as text or token ids; its longest prefix in `cache` or in the
        agent's own cache is not computed again. With `append` the prompt follows the cached tokens
        instead. Agents of different tenants never share anything, even under the same name. `note`
        is opaque text saved with the agent. Without `keep` the request reuses what is cached and
        adds nothing to it: its blocks are freed at its end, and its agent stays as it was.

        Raises InvalidRequestError (empty prompt, max_tokens below 1, a token id the model does
        not have, `append` without a cache), CacheReconstructionError (another model's cache) and
        PoolExhaustedError (could not fit even alone), before any state changes.
        """
        ...

    def cancel(self, uid: str) -> bool:
        """End a request at the next step; False if it is unknown or has ended."""
        ...

    def step(self) -> Iterator[CompletedGeneration]:
        """Run until no request is left, yielding each generation as it completes.

        The caller may submit more between two completions, or stop iterating and call again.
        """
        ...

    def step_once(self) -> list[EngineEvent]:
        """Run exactly one step; returns its events.

        Admits waiting requests, computes prefill chunks up to the budget, then decodes one token
        for every decoding request, including those whose prompt was completed in this step.
        """
        ...
