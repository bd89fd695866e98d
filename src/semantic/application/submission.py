"""What a caller asks of the engine, as it was given; nothing here is checked yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from semantic.domain.entities import AgentBlocks
from semantic.domain.value_objects import SamplingParams

KV = TypeVar("KV")


@dataclass(frozen=True)  # no slots: on 3.11 they break `Submission[KV](...)`
class Submission(Generic[KV]):
    """The arguments of `GenerationEnginePort.submit`."""

    agent_id: str
    prompt: str | Sequence[int]
    cache: AgentBlocks[KV] | None
    max_tokens: int
    sampling: SamplingParams
    append: bool = False
    tenant: str = ""
    note: str = ""
