"""The events of an answer, in the order of generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semantic.domain.match import MatchReport
from semantic.domain.value_objects import Lane, TokenLogprob

AnswerReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The engine accepted a request. Its prompt has `prompt_tokens` tokens."""

    uid: str
    agent_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The cache contains `done` of `total` prompt tokens; `done` is 0 after a preemption."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The log-probabilities of the prompt's tokens. The first token has None."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. `text` may be empty while a character is incomplete."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The start of the answer's tool call number `index`, counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of JSON text in the arguments of tool call number `index`."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallFailed:
    """The text between a tool call's marks is not a call. `TextDelta`s with this text follow."""

    problem: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt: int
    cached: int  # reused prompt tokens
    completion: int
    reasoning: int = 0
    match: MatchReport | None = None
    kept: bool = True  # the cache keeps the computed tokens
    noted: int = 0  # attachments that the prompt only mentions
    lane: Lane | None = None
    exact: bool = True  # all steps were in the lane
    drafted: int = 0  # tokens that steps checked in advance
    accepted: int = 0  # of these, tokens of the answer

    @property
    def written(self) -> int:
        """The number of prompt tokens that were computed and that the cache keeps."""
        return self.prompt - self.cached if self.kept else 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last event of an answer. `stop_string` is the stop string that ended it, if any."""

    reason: AnswerReason
    usage: Usage
    stop_string: str | None = None
    error: str | None = None
    match: MatchReport | None = None


AnswerPiece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ToolCallFailed

AnswerEvent = AnswerStarted | PromptProgress | PromptScored | AnswerPiece | AnswerEnd
"""An event of an answer. AnswerStarted is the first event, and AnswerEnd is the last."""
