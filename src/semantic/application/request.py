"""Request: one generation request, with its phase, its tokens and its text so far."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.identity import NO_HINTS, Hints
from semantic.domain.match import MatchEnd, MatchReport
from semantic.domain.stop_strings import StopStrings
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import (
    CacheKey,
    CompletedGeneration,
    FinishReason,
    SampledToken,
    SamplingParams,
    SequenceId,
    ThinkingBudget,
    TokenEvent,
    TokenLogprob,
)
from semantic.ports.generation import Detokenizer

_INCOMPLETE = "\ufffd"
_CONTEXT_PIECES = 4
"""The number of pieces to decode again before each new piece, as they can change its text."""


class ByteDetokenizer:
    """Implements `Detokenizer` for tokens whose text is the concatenation of their bytes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` returns a token's bytes in UTF-8."""
        self._bytes_of = bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decode(b"", True)


class StreamingDetokenizer:
    """Implements `Detokenizer` by decoding each token with a few earlier tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        """`after` are the tokens before the first token."""
        self._decode = decode
        self._tokens: list[int] = []  # the context, and the tokens after it
        self._ends: list[int] = []  # ends of the pieces in the context
        self._context = ""  # the emitted text of tokens[:ends[-1]]
        last = list(after[-_CONTEXT_PIECES:])
        text = decode(last) if last else ""
        if text and not text.endswith(_INCOMPLETE):
            self._tokens, self._ends, self._context = last, [len(last)], text

    def push(self, token: int) -> str:
        self._tokens.append(token)
        window = self._decode(self._tokens)
        return "" if window.endswith(_INCOMPLETE) else self._emit(window)

    def flush(self) -> str:
        if not self._tokens or (self._ends and self._ends[-1] == len(self._tokens)):
            return ""
        return self._emit(self._decode(self._tokens))

    def whole(self, token: int) -> str:
        """Return the text of the last token, even if it is only a part of a character."""
        return self.push(token) + self.flush()

    def _emit(self, window: str) -> str:
        text = window[len(self._context) :]
        self._ends.append(len(self._tokens))
        self._context = window
        if len(self._ends) > 2 * _CONTEXT_PIECES:
            self._shorten()
        return text

    def _shorten(self) -> None:
        cut = self._ends[-_CONTEXT_PIECES - 1]
        del self._tokens[:cut]
        self._ends = [end - cut for end in self._ends[-_CONTEXT_PIECES:]]
        self._context = self._decode(self._tokens)


_Part = Literal["text", "thought", "call"]


class ThinkingMeter:
    """Counts the tokens of one answer's reasoning."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._part: _Part = "thought" if budget.opened else "text"
        # The marks that end each part, and the part that each begins.
        self._ends: dict[_Part, dict[str, _Part]] = {
            "text": _marks({budget.start: "thought", budget.call_start: "call"}),
            "thought": _marks({budget.end: "text", budget.call_start: "call"}),
            "call": _marks({budget.call_end: "text"}),
        }
        self._used = 0
        self._text = ""  # the end of the text so far, which may begin a mark
        self._last: deque[int] = deque(maxlen=len(budget.end_tokens))
        self._forced = 0  # tokens of the mark that are still to come
        self._lead = ""  # the text before any reasoning
        self._is_over = False  # no reasoning can follow

    def push(self, token: int, text: str) -> tuple[int, ...]:
        """Count the next token. Returns the tokens that must follow to end the reasoning."""
        if self._is_over:
            return ()
        was_inside = self._inside
        self._last.append(token)
        self._read(text)
        if self._forced:
            self._forced -= 1
            self._part = "thought" if self._forced else "text"
        elif self._inside and tuple(self._last) == self._budget.end_tokens:
            self._part = "text"
        self._is_over = self._budget.only_first and self._has_passed(text, was_inside=was_inside)
        if self._forced or self._is_over:
            return ()
        self._used += was_inside and self._inside
        if not self._inside or self._used < self._budget.tokens:
            return ()
        rest = self._rest()
        self._forced = len(rest)
        return rest

    @property
    def _inside(self) -> bool:
        return self._part == "thought"

    def _has_passed(self, text: str, *, was_inside: bool) -> bool:
        if self._inside:
            return False
        self._lead = (self._lead + text).lstrip()
        return was_inside or not self._budget.start.startswith(self._lead)

    def _read(self, text: str) -> None:
        self._text += text
        while True:
            ends = self._ends[self._part]
            places = ((self._text.find(mark), mark) for mark in ends)
            at, mark = min((place for place in places if place[0] >= 0), default=(-1, ""))
            if at < 0:
                open_mark = max(map(len, ends), default=1) - 1
                self._text = self._text[max(0, len(self._text) - open_mark) :]
                return
            self._text, self._part = self._text[at + len(mark) :], ends[mark]

    def _rest(self) -> tuple[int, ...]:
        end, last = self._budget.end_tokens, tuple(self._last)
        for n_written in range(min(len(last), len(end) - 1), 0, -1):
            if last[-n_written:] == end[:n_written]:
                return end[n_written:]
        return end


def _marks(parts: dict[str, _Part]) -> dict[str, _Part]:
    return {mark: part for mark, part in parts.items() if mark}


_SCORED_CHUNK = 128
"""The number of prompt tokens in a scoring call. Log-probabilities depend slightly on it."""


class Phase(Enum):
    WAITING = "waiting"
    """The request holds no blocks: it is new or preempted."""
    LOAD = "load"
    """Threads read the request's stored prefix into its blocks."""
    PREFILL = "prefill"
    """Some of the request's tokens still need prefill."""
    DECODE = "decode"
    """The request takes part in every decode step."""
    FINISHED = "finished"


@dataclass(slots=True)
class Restore:
    """An idle cache to restore: the first `length` tokens of `blocks`. If `exclusive`, only this
    request uses the blocks."""

    blocks: AgentBlocks
    length: int
    exclusive: bool
    pinned: Sequence[KVBlock] = ()
    """The blocks that the request holds only until the backend has read them."""


@dataclass(slots=True)
class Reuse:
    """The part of an agent's cache that the agent's request could reuse."""

    history: tuple[int, ...] | None = None
    """Tokens of the agent's previous turn; None if the agent is unknown."""
    manifest: Manifest | None = None
    end: MatchEnd = MatchEnd.MISSING
    """The reason why the reused prefix is not longer."""
    source: str = "none"
    """The source of the reused prefix: "pool", a tier's name, or "none"."""
    any_chip: bool = False
    """True if blocks of another kind of chip count too."""


@dataclass(slots=True, eq=False)
class Request:
    """A submitted request. `number` is its position in the order of arrival."""

    uid: str
    number: int
    agent_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    eos_token_ids: frozenset[int]
    detokenizer: Detokenizer
    given_cache: AgentBlocks | None = None
    tenant: str = ""
    note: str = ""
    keep: bool = True
    """True if the agent's cache and the store keep its tokens for later requests."""
    hints: Hints = NO_HINTS
    predicted: tuple[int, ...] = ()
    """Tokens that the answer may contain."""
    arrived: float = 0.0
    """Time of arrival by the engine's clock, in seconds."""

    phase: Phase = Phase.WAITING
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    scores: list[TokenLogprob | None] = field(default_factory=list)
    error: str | None = None
    exact: bool = True
    """False after a step outside the model's lane."""
    drafted: int = 0
    accepted_at: set[int] = field(default_factory=set)
    """Places of accepted drafts in the answer. The answer may end before them."""
    blocks: list[list[KVBlock]] = field(default_factory=list)
    capacity: int = 0
    borrows: bool = False
    """True if other agents may use some of the blocks."""
    restore: Restore | None = None
    sequence: SequenceId | None = None
    computed: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    cancel_requested: bool = False
    prefill_seconds: float = 0.0
    reuse: Reuse = field(default_factory=Reuse)
    forced: tuple[int, ...] = ()
    """Tokens that must come next: the rest of the mark that ends reasoning."""
    _text: list[str] = field(default_factory=list)
    _stop: StopStrings = field(init=False)
    _meter: ThinkingMeter | None = field(init=False)

    def __post_init__(self) -> None:
        budget = self.params.thinking
        self._meter = None if budget is None else ThinkingMeter(budget)
        self._stop = StopStrings(self.params.stop, self.params.thoughts)
        self._drop_scores()

    # Tokens:  prompt            generated
    #         |0 ......... p-1 | p ....... p+g-1 |
    #         | computed: in the cache  | the last token is the input of the next decode step
    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.generated)

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.generated)

    @property
    def to_prefill(self) -> int:
        """The number of tokens to compute before decoding. The first decode step computes the last
        token."""
        return max(0, self.n_tokens - 1 - self.computed)

    @property
    def max_total_tokens(self) -> int:
        """The maximum length of prompt and answer together, in tokens."""
        return len(self.prompt) + self.max_tokens

    @property
    def accepted(self) -> int:
        """The number of accepted drafts in the answer so far."""
        return sum(at < len(self.generated) for at in self.accepted_at)

    @property
    def awaits_first_token(self) -> bool:
        """True if the request has received no token since decoding began."""
        return self.phase is Phase.DECODE and self.computed < self.n_tokens

    @property
    def scoring(self) -> bool:
        """True while log-probabilities of the prompt are still missing."""
        return self.params.prompt_logprobs is not None and len(self.scores) < len(self.prompt)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._stop.matched

    @property
    def owner(self) -> str:
        """The request's name in the pool."""
        return CacheKey("", self.agent_id, self.tenant).owner

    @property
    def text(self) -> str:
        return "".join(self._text)

    def next_chunk(self, limit: int, checkpoint_at: int | None = None) -> tuple[int, ...]:
        """Return the next tokens to prefill."""
        return self.tokens[self.computed : self.next_stop(limit, checkpoint_at)]

    def next_stop(self, limit: int, checkpoint_at: int | None = None) -> int:
        """Return the position where the next chunk ends, at most `limit` tokens ahead. The chunk
        does not cross `checkpoint_at`."""
        end = self.n_tokens - 1
        stop = min(self.computed + limit, end)
        if stop == end - 1 and stop - self.computed > 1:
            stop -= 1
        if checkpoint_at is not None and checkpoint_at > self.computed:
            stop = min(stop, checkpoint_at)
        return max(self.computed, stop)

    def next_scored(self) -> tuple[int, ...]:
        """Return the next tokens to score, preceded by one token of context."""
        stop = min(self.computed + _SCORED_CHUNK, len(self.prompt) - 1)
        return self.prompt[self.computed : stop + 1]

    def preempt(self) -> None:
        """Return the request to WAITING, and drop its keys and values."""
        if self.scoring:
            self._drop_scores()
        self.phase = Phase.WAITING
        self.computed = 0
        self.cached_tokens = 0
        self.preemptions += 1

    def as_cache(self, length: int, model_id: str) -> AgentBlocks:
        """Return the request's blocks as a cache of its first `length` tokens."""
        cache = AgentBlocks(
            self.agent_id, token_ids=self.tokens[:length], model_id=model_id, owner=self.owner
        )
        for layer in self.blocks:
            for block in layer:
                cache.add_block(block)
        return cache

    def accept(self, sampled: SampledToken) -> tuple[str, FinishReason | None]:
        """Append a generated token. Return the text that is now final, and the finish reason after
        the last token."""
        _, token, logprob, error, _, exact = sampled
        self.exact &= exact
        self.generated.append(token)
        self.computed = len(self.prompt) + len(self.generated)
        if logprob is not None:
            self.logprobs.append(logprob)
        text, reason = self._next_text(token)
        if error is not None:
            self.error, reason = error, "error"
        self._text.append(text)
        return text, reason

    def take(self, sampled: SampledToken) -> tuple[TokenEvent, FinishReason | None]:
        """Append a generated token, and return its event."""
        text, reason = self.accept(sampled)
        event = TokenEvent(self.uid, self.agent_id, sampled.token, text, sampled.logprob)
        return event, reason

    def take_forced(self, n_computed: int) -> Iterator[tuple[TokenEvent, FinishReason | None]]:
        """Append the `forced` tokens, and yield their events."""
        forced, self.forced = self.forced, ()
        for token in forced:
            certain = None if self.params.logprobs is None else TokenLogprob(token, 0.0)
            event, reason = self.take(SampledToken(SequenceId(0), token, certain))
            self.computed = n_computed
            yield event, reason
            if reason is not None:
                return

    def may_end_with(self, sampled: SampledToken) -> bool:
        """Return whether `sampled` may end the answer."""
        return (
            sampled.error is not None
            or sampled.token in self.eos_token_ids
            or len(self.generated) + 1 >= self.max_tokens
            or bool(self.params.stop)
            or self._meter is not None
        )

    def completed(
        self,
        reason: FinishReason,
        match: MatchReport,
        *,
        blocks: AgentBlocks | None = None,
        error: str | None = None,
    ) -> CompletedGeneration:
        """Return the result of the request."""
        return CompletedGeneration(
            uid=self.uid,
            agent_id=self.agent_id,
            text=self.text,
            tokens=tuple(self.generated),
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens,
            blocks=blocks,
            logprobs=tuple(self.logprobs),
            error=error or self.error,
            match=match,
            stop_string=self.stop_string,
            prompt_logprobs=() if self.scoring else tuple(self.scores),
            exact=self.exact,
            drafted=self.drafted,
            accepted=self.accepted,
        )

    def end_text(self) -> str:
        """Return the text that the request still holds back at the end of its answer."""
        text = self._rest()
        self._text.append(text)
        return text

    def _drop_scores(self) -> None:
        self.scores = [] if self.params.prompt_logprobs is None else [None]

    def _next_text(self, token: int) -> tuple[str, FinishReason | None]:
        if token in self.eos_token_ids:
            return self._rest(), "stop"
        text = self.detokenizer.push(token)
        if self._meter is not None:
            self.forced = self._meter.push(token, text)
        if self.params.stop:
            text = self._stop.push(text)
            if self._stop.stopped:
                return text, "stop"
        if len(self.generated) < self.max_tokens:
            return text, None
        return text + self._rest(), self._reason_at_length()

    def _reason_at_length(self) -> FinishReason:
        # The characters just released may complete a stop string.
        return "stop" if self._stop.stopped else "length"

    def _rest(self) -> str:
        text = self._stop.push(self.detokenizer.flush())
        return text + self._stop.flush()
