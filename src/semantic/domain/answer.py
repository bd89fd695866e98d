"""Events of an answer: its pieces in the order of generation, then its end. A streamed response
sends the pieces; a whole response joins the same pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semantic.domain.match import MatchReport
from semantic.domain.value_objects import TokenLogprob

AnswerReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """An accepted request: its agent and the number of prompt tokens."""

    uid: str
    agent_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The cache contains `done` of `total` prompt tokens; 0 after a preemption."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens, if requested, sent before any text; the entry of
    the first token is None."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer. `text` is empty only with `logprobs`, which then belong to a token
    whose character is still incomplete."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """Start of the answer's tool call number `index`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the JSON text of the arguments of tool call number `index`."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallFailed:
    """Why the text between the marks of a tool call is not a call. The text itself comes next."""

    problem: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer. The prompt reused `cached` tokens; `match` says why not more.
    `kept`: the cache keeps the computed tokens. `noted` counts the pictures, sounds and documents
    that the prompt mentions in a note."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0
    match: MatchReport | None = None
    kept: bool = True
    noted: int = 0

    @property
    def written(self) -> int:
        """Number of computed prompt tokens that the cache keeps."""
        return self.prompt - self.cached if self.kept else 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last event. `stop_string` is the stop string that ended the answer, or None."""

    reason: AnswerReason
    usage: Usage
    stop_string: str | None = None
    error: str | None = None
    match: MatchReport | None = None


AnswerPiece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ToolCallFailed

AnswerEvent = AnswerStarted | PromptProgress | PromptScored | AnswerPiece | AnswerEnd
"""An event of an answer: AnswerStarted is the first, AnswerEnd the last."""
