"""Values of the domain: specs of models' caches, sampling parameters, events of requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal, NamedTuple, NewType, Protocol, runtime_checkable

from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.domain.identity import digest
from semantic.domain.match import MatchReport

SequenceId = NewType("SequenceId", int)
"""Identifies a sequence that is open in a backend."""

BLOCK_TOKENS = 256
"""The number of tokens per block. MLX's own caches grow in steps of 256 too."""


def whole_blocks(n_tokens: int) -> int:
    """Return `n_tokens` rounded up to whole blocks."""
    return -(-n_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


FinishReason = Literal["stop", "length", "cancelled", "error"]


class LayerKind(StrEnum):
    """Kinds of layers by the content of their caches."""

    FULL = "global"
    """The keys and values of every past token."""
    SLIDING_WINDOW = "sliding_window"
    """The keys and values of the last `window` tokens."""
    STATE = "state"
    """A state after the last token, which cannot be cut back to an earlier token."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's cache of a sequence.

    In a STATE layer the numbers of heads and their sizes are 0. `state_bytes` is per sequence or,
    if `state_grows`, per block.
    """

    kind: LayerKind
    kv_heads: int = 0
    k_head_dim: int = 0
    v_head_dim: int = 0
    itemsize: int = 0
    window: int | None = None
    state_bytes: int = 0
    state_grows: bool = False

    def __post_init__(self) -> None:
        if (self.kind is LayerKind.SLIDING_WINDOW) != (self.window is not None):
            raise ValueError(f"a {self.kind} layer got window={self.window}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}")

    @property
    def bytes_per_block(self) -> int:
        """The number of bytes of one block of this layer."""
        if self.kind is LayerKind.STATE:
            return self.state_bytes
        per_token = self.kv_heads * (self.k_head_dim + self.v_head_dim) * self.itemsize
        return per_token * BLOCK_TOKENS

    @property
    def max_blocks(self) -> int | None:
        """The maximum number of blocks that a sequence has in this layer; None if it grows with the
        sequence."""
        if self.kind is LayerKind.STATE:
            return None if self.state_grows else 1
        if self.window is None:
            return None
        blocks = math.ceil(self.window / BLOCK_TOKENS)
        room = blocks * BLOCK_TOKENS - self.window
        # When all blocks are full, the window moves to the front: many steps share a move.
        return blocks if room >= BLOCK_TOKENS // 2 else blocks + 1

    def blocks_for(self, n_tokens: int) -> int:
        """Return the number of blocks that a sequence of `n_tokens` needs in this layer."""
        needed = math.ceil(n_tokens / BLOCK_TOKENS)
        return needed if self.max_blocks is None else min(needed, self.max_blocks)


ExactBatch = Literal["auto", "on", "off"]
"""How decode steps use a `Lane`: always, never, or if that costs little time."""
Drafts = Literal["auto", "off"]
"""How decode steps use drafts: if that pays, or never."""
KvBits = Literal[8, 16]
"""The bits of a number in caches: 16 means the bits that the model computes with."""


@dataclass(frozen=True, slots=True)
class Lane:
    """The numbers of rows of a decode step in which a row has the same bits beside any others."""

    fewest: int = 1
    """Steps with fewer rows get padding rows."""
    most: int | None = None
    """The most rows; None for any number."""
    splits: bool = True
    """More rows are several steps. If False, they are one step outside the lane."""
    problem: str = ""
    """The reason why a row's bits depend on the number of rows, or ""."""

    @property
    def most_per_step(self) -> int | None:
        """The most rows of one step; None for any number."""
        return self.most if self.splits else None

    def holds(self, n_rows: int) -> bool:
        """Return whether `n_rows` rows decode inside the lane."""
        return self.most is None or self.splits or n_rows <= self.most


@runtime_checkable
class DescribesCache(Protocol):
    """A model object that can describe its cache."""

    def cache_spec(self) -> ModelCacheSpec: ...


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """A model's cache of one sequence, layer by layer."""

    layers: tuple[LayerSpec, ...]
    reusable_tokens: int | None = None
    """The number of a prompt's first tokens that a request may reuse; None for all tokens. The
    cache of later tokens depends on prefill's chunks."""

    readers: ClassVar[list[Callable[[object], ModelCacheSpec | None]]] = []
    """Functions that return the spec of a framework's model object."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer")

    @classmethod
    def from_model(cls, model: object) -> ModelCacheSpec:
        """Return the spec of `model`. Raises InvalidRequestError if no reader recognises it."""
        if isinstance(model, DescribesCache):
            return model.cache_spec()
        for reader in cls.readers:
            spec = reader(model)
            if spec is not None:
                return spec
        raise InvalidRequestError(
            f"expected a loaded model (see semantic.load), got {type(model).__name__}"
        )

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def reusable(self, n_tokens: int) -> int:
        """Return how many of a sequence's first `n_tokens` tokens a request may reuse."""
        return n_tokens if self.reusable_tokens is None else min(n_tokens, self.reusable_tokens)

    @property
    def layer_types(self) -> tuple[LayerKind, ...]:
        return tuple(layer.kind for layer in self.layers)

    @property
    def n_kv_heads(self) -> int:
        """The largest number of KV heads in any layer."""
        return max(layer.kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """The largest key head size of any layer."""
        return max(layer.k_head_dim for layer in self.layers)

    def bytes_per_block(self, layer_id: int) -> int:
        """Return the bytes of one block of layer `layer_id`."""
        return self.layers[layer_id].bytes_per_block

    def blocks_for(self, n_tokens: int) -> tuple[int, ...]:
        """Return how many blocks each layer needs for a sequence of `n_tokens`."""
        return tuple(layer.blocks_for(n_tokens) for layer in self.layers)

    def bytes_for(self, n_tokens: int) -> int:
        """Return the bytes of all blocks of a sequence of `n_tokens`."""
        return self.bytes_of(self.blocks_for(n_tokens))

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Return the bytes of `counts[layer]` blocks of each layer."""
        sizes = (layer.bytes_per_block for layer in self.layers)
        return sum(n * size for n, size in zip(counts, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Identifies an agent's idle cache by model, tenant and agent."""

    model_id: str
    agent_id: str
    tenant: str = ""

    @property
    def owner(self) -> str:
        """The pool's name for the holder of the agent's blocks. A tenant cannot choose it."""
        if not self.tenant:
            return self.agent_id
        return f"tenant:{digest('owner-v1', _utf8(self.tenant), _utf8(self.agent_id)).hex()}"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message)


def _is_filled_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limits an answer's reasoning between the marks `start` and `end` to `tokens`.

    At the limit, the answer continues with `end_tokens`, the tokens of `end`. Raises
    InvalidRequestError if a mark is missing or `tokens` is too small.
    """

    tokens: int
    start: str
    end: str
    end_tokens: tuple[int, ...]
    opened: bool = False  # the prompt ends inside reasoning
    call_start: str = ""  # text between these marks is a call, not reasoning
    call_end: str = ""
    only_first: bool = False  # only reasoning at the answer's beginning counts

    def __post_init__(self) -> None:
        least = 1 if self.opened else 0
        if self.tokens < least:
            raise InvalidRequestError(
                f"a thinking budget must be {least} or more, got {self.tokens}"
            )
        if not self.start or not self.end or not self.end_tokens:
            raise InvalidRequestError("a thinking budget needs both marks of reasoning")


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around an answer's reasoning. If `opened`, the answer begins inside it."""

    start: str
    end: str
    opened: bool = False


_MAX_PENALTY = 2
"""The largest presence or frequency penalty, as in OpenAI's API."""


_LEAST_TEMPERATURE = 1e-6
"""A smaller temperature counts as 0: in fp32 its reciprocal may be infinite."""
_LEAST_TOP_P = 1e-4
"""A smaller `top_p` counts as 0: rounding could leave no token to draw."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options for choosing the next token. The defaults mean greedy decoding."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: any number of tokens
    min_p: float = 0.0
    repetition_penalty: float | None = None
    repetition_context: int = 20
    presence_penalty: float = 0.0  # once per token in the answer
    frequency_penalty: float = 0.0  # once per occurrence in the answer
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added, by token id
    seed: int | None = None  # None: a random seed
    stop: tuple[str, ...] = ()  # without effect inside `thoughts`
    logprobs: int | None = None  # the number of alternatives to report; None reports nothing
    prompt_logprobs: int | None = None
    ignore_eos: bool = False  # continue past the model's end tokens
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    thoughts: Thoughts | None = None

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature)
        _require(
            finite and self.temperature >= 0,
            f"temperature must be 0 or more, got {self.temperature}",
        )
        _require(0 <= self.top_p <= 1, f"top_p must be between 0 and 1, got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be between 0 and 1, got {self.min_p}")
        _require(self.top_k >= 0, f"top_k must be 0 or more, got {self.top_k}")
        penalty = self.repetition_penalty
        _require(
            penalty is None or (math.isfinite(penalty) and penalty > 0),
            f"repetition_penalty must be above 0, got {penalty}",
        )
        _require(
            self.repetition_context >= 1,
            f"repetition_context must be at least 1 token, got {self.repetition_context}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(
                abs(value) <= _MAX_PENALTY,
                f"{name} must be between -{_MAX_PENALTY} and {_MAX_PENALTY}, got {value}",
            )
        _require(
            all(math.isfinite(bias) for bias in self.logit_bias.values()),
            "logit_bias values must be finite numbers",
        )
        _require(not isinstance(self.stop, str), "stop must be a tuple of strings, got a string")
        _require(
            all(map(_is_filled_text, self.stop)),
            f"stop must contain only non-empty strings, got {self.stop!r}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"{name} must be 0 or more, got {value}")
        _require(
            self.seed is None or 0 <= self.seed < 2**63,
            f"seed must be between 0 and 2**63 - 1, got {self.seed}",
        )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_p < _LEAST_TOP_P


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log-probabilities of a token and of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """A backend's token for one sequence in one decode step.

    If `error` is not None, `token` is invalid and the sequence cannot continue. If `finite` is
    False, the sequence's cache is invalid too. If `exact` is False, the step was outside the
    model's lane.
    """

    sequence: SequenceId
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    finite: bool = True
    exact: bool = True


class TokenEvent(NamedTuple):
    """A new token of a running request, and the text that the token completes."""

    uid: str
    agent_id: str
    token: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """The cache contains `done` of `total` prompt tokens; `done` is 0 after a preemption."""

    uid: str
    agent_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class CompletedGeneration:
    """The result of a finished request."""

    uid: str
    agent_id: str
    text: str  # without end token and stop string
    tokens: tuple[int, ...]  # all generated tokens, the end token included
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens
    blocks: AgentBlocks | None = None  # valid until the agent's next request or an eviction
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    match: MatchReport | None = None
    stop_string: str | None = None  # the one that ended the answer
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # the first is None
    exact: bool = True  # all steps were in the model's lane
    drafted: int = 0  # tokens that steps checked in advance
    accepted: int = 0  # of these, tokens of the answer

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PoolView:
    """An agent's blocks in the pool: their number in each layer, and their total size."""

    agent_id: str
    blocks_per_layer: tuple[int, ...]
    n_bytes: int

    @property
    def n_blocks(self) -> int:
        return sum(self.blocks_per_layer)
