"""An answer as it comes: pieces in the order in which they were written, then its end.

A stream sends the pieces; a reply that is not a stream is made of the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from semantic.domain.match import MatchReport
from semantic.domain.value_objects import TokenLogprob

AnswerReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The request was taken in: its agent, and how many tokens its prompt has."""

    uid: str
    agent_id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """So many prompt tokens of `total` are in the cache now."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens; None for the first, which follows nothing.

    Comes before any text, and only when it was asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text. `text` is never empty, unless there are `logprobs`: a token
    whose characters are still incomplete has one as well."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The answer's call number `index` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the JSON text of the arguments of call number `index`."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallFailed:
    """The model began a tool call that cannot be read; `text` is what it wrote. It is the last
    piece before the end, whose reason is "error"."""

    text: str
    problem: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took, in tokens. `cached` prompt tokens were not computed again; `match`
    says why not more."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0
    match: MatchReport | None = None

    @property
    def written(self) -> int:
        """Prompt tokens that were computed, and are in the cache from now on."""
        return self.prompt - self.cached

    @property
    def total(self) -> int:
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last piece. `stop_string` is the one that ended the answer, if one did."""

    reason: AnswerReason
    usage: Usage
    stop_string: str | None = None
    error: str | None = None
    match: MatchReport | None = None


AnswerPiece = TextDelta | ReasoningDelta | ToolCallStarted | ToolCallDelta | ToolCallFailed
"""What a model wrote, sorted."""

AnswerEvent = AnswerStarted | PromptProgress | PromptScored | AnswerPiece | AnswerEnd
"""All that can be told of an answer: AnswerStarted comes first, AnswerEnd last."""
