"""What a caller asks of the engine, as it was given; nothing here is checked yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semantic.domain.entities import AgentBlocks
from semantic.domain.value_objects import SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """The arguments of `GenerationEnginePort.submit`."""

    agent_id: str
    prompt: str | Sequence[int]
    cache: AgentBlocks | None
    max_tokens: int
    sampling: SamplingParams
    append: bool = False
    tenant: str = ""
    note: str = ""
