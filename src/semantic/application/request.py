"""One request on its way: what was asked, how far it is, what it has said so far.

State is counts and token lists from which the rest follows. Knows no pool, backend or clock;
the engine moves it from phase to phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from semantic.application.cache.prefix_state import PrefixState
from semantic.application.detokenizer import StreamingDetokenizer
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.stop_strings import StopStrings
from semantic.domain.value_objects import (
    CacheKey,
    FinishReason,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenLogprob,
)

_SCORED_CHUNK = 128
"""Prompt tokens that are scored at once. Figures depend on it in their last bits, so it depends
on nothing; and there are log-probabilities of a whole vocabulary for each of them in memory."""


class Phase(Enum):
    """Where a request is."""

    WAITING = "waiting"
    """Holds no blocks: just arrived, or preempted."""
    LOAD = "load"
    """Holds blocks; waits until what a store has of it is read into them."""
    PREFILL = "prefill"
    """Holds blocks for its tokens; not all of them are computed."""
    DECODE = "decode"
    """Takes part in every decode step."""
    FINISHED = "finished"


@dataclass(slots=True)
class Restore:
    """A cache to begin with: the first `length` tokens of `blocks`.

    `exclusive`: nobody else holds the blocks, the request owns them. Otherwise they are only
    pinned until they have been copied.
    """

    blocks: AgentBlocks
    length: int
    exclusive: bool


@dataclass(slots=True, eq=False)
class Request:
    """A submitted request. `number` is its place in the order of arrival."""

    uid: str
    number: int
    agent_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    eos_token_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    given_cache: AgentBlocks | None = None
    tenant: str = ""
    note: str = ""

    phase: Phase = Phase.WAITING
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob | None] = field(default_factory=list)
    error: str | None = None
    blocks: list[list[KVBlock]] = field(default_factory=list)
    capacity: int = 0
    restore: Restore | None = None
    sequence: SequenceId | None = None
    computed: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    cancel_requested: bool = False
    archived: PrefixState = field(default_factory=PrefixState)
    _text: list[str] = field(default_factory=list)
    _detokenizer: StreamingDetokenizer = field(init=False)
    _stop: StopStrings = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = StreamingDetokenizer(self.decode)
        self._stop = StopStrings(self.params.stop)
        self._drop_scores()

    # Tokens:  prompt            generated
    #         |0 ......... p-1 | p ....... p+g-1 |
    #         | computed: in the cache  | the last token runs in the next decode step
    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and generated tokens."""
        return (*self.prompt, *self.generated)

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def to_prefill(self) -> int:
        """Tokens to compute before it can decode: all but the last, which gives the logits."""
        return max(0, self.n_tokens - 1 - self.computed)

    @property
    def most_tokens(self) -> int:
        """The most tokens its cache may ever hold."""
        return len(self.prompt) + self.max_tokens

    @property
    def silent(self) -> bool:
        """Whether it decodes and its first token since it does is still to come."""
        return self.phase is Phase.DECODE and self.computed < self.n_tokens

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.params.prompt_logprobs is not None and len(self.scores) < len(self.prompt)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stop.matched

    @property
    def owner(self) -> str:
        """In whose name the pool holds its blocks."""
        return CacheKey("", self.agent_id, self.tenant).owner

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    def next_chunk(self, limit: int) -> tuple[int, ...]:
        """The next tokens to prefill, at most `limit`; not beyond a junction."""
        stop = min(self.computed + limit, self.n_tokens - 1)
        junction = self.archived.junction
        if junction is not None and junction > self.computed:
            stop = min(stop, junction)
        return self.tokens[self.computed : stop]

    def next_scored(self) -> tuple[int, ...]:
        """The next tokens to score, and the one before them."""
        stop = min(self.computed + _SCORED_CHUNK, len(self.prompt) - 1)
        return self.prompt[self.computed : stop + 1]

    def preempt(self) -> None:
        """Back to waiting, with its tokens and without anything computed."""
        if self.scoring:
            self._drop_scores()
        self.phase = Phase.WAITING
        self.computed = 0
        self.cached_tokens = 0
        self.preemptions += 1
        self.archived.wait_again()

    def as_cache(self, length: int, model_id: str) -> AgentBlocks:
        """Its blocks, as a cache of its first `length` tokens."""
        cache = AgentBlocks(
            self.agent_id,
            token_ids=self.tokens[:length],
            model_id=model_id,
            owner=self.owner,
        )
        for layer in self.blocks:
            for block in layer:
                cache.add_block(block)
        return cache

    def accept(self, sampled: SampledToken) -> tuple[str, FinishReason | None]:
        """Take one generated token; the text it made certain, and why it was the last, if so."""
        self.generated.append(sampled.token)
        self.computed = self.n_tokens
        if sampled.logprob is not None:
            self.logprobs.append(sampled.logprob)
        text, reason = self._next_text(sampled.token)
        if sampled.error is not None:
            self.error, reason = sampled.error, "error"
        self._text.append(text)
        return text, reason

    def end_text(self) -> str:
        """What was held back, when the answer ends without a word from the model."""
        text = self._rest()
        self._text.append(text)
        return text

    def _drop_scores(self) -> None:
        """Nothing is scored yet but the first token, which follows nothing."""
        self.scores = [] if self.params.prompt_logprobs is None else [None]

    def _next_text(self, token: int) -> tuple[str, FinishReason | None]:
        if token in self.eos_token_ids:
            return self._rest(), "stop"
        text = self._stop.push(self._detokenizer.push(token))
        if self._stop.stopped:
            return text, "stop"
        if len(self.generated) < self.max_tokens:
            return text, None
        return text + self._rest(), self._reason_at_length()

    def _reason_at_length(self) -> FinishReason:
        # The last characters, held back until now, may have completed a stop string.
        return "stop" if self._stop.stopped else "length"

    def _rest(self) -> str:
        text = self._stop.push(self._detokenizer.flush())
        return text + self._stop.flush()
