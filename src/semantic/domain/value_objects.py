"""Values of the domain: specs of models' caches, sampling parameters, events of requests. All are
immutable and compared by content. Knows no arrays or files; sizes are in tokens or bytes."""

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
"""Tokens per block. MLX's own caches grow in steps of 256, so that blocks and arrays end
together."""


def whole_blocks(n_tokens: int) -> int:
    """Return `n_tokens` rounded up to whole blocks."""
    return -(-n_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


FinishReason = Literal["stop", "length", "cancelled", "error"]


class LayerKind(StrEnum):
    """Kinds of layers by the content of their caches. Configuration files and reports use these
    values."""

    FULL = "global"
    """The keys and values of every past token."""
    SLIDING_WINDOW = "sliding_window"
    """The keys and values of the last `window` tokens."""
    STATE = "state"
    """A state after the last token, which cannot be cut back to an earlier token (recurrent,
    latent, mixed)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Describes one layer's cache of a sequence. In a STATE layer `kv_heads`, `k_head_dim` and
    `v_head_dim` are 0. `state_bytes` is the size of the state: per sequence or, if `state_grows`,
    per block."""

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
        """Bytes of one block of this layer: keys and values of 256 tokens, or the state."""
        if self.kind is LayerKind.STATE:
            return self.state_bytes
        per_token = self.kv_heads * (self.k_head_dim + self.v_head_dim) * self.itemsize
        return per_token * BLOCK_TOKENS

    @property
    def max_blocks(self) -> int | None:
        """The most blocks that a sequence ever has in this layer; None if the number grows with the
        sequence. A window layer has the blocks that hold the window, plus one more if they leave
        less than half a block free. New tokens fill the free space. When all blocks are full, the
        window moves to the front, so that many steps share the cost of a move."""
        if self.kind is LayerKind.STATE:
            return None if self.state_grows else 1
        if self.window is None:
            return None
        blocks = math.ceil(self.window / BLOCK_TOKENS)
        room = blocks * BLOCK_TOKENS - self.window
        return blocks if room >= BLOCK_TOKENS // 2 else blocks + 1

    def blocks_for(self, n_tokens: int) -> int:
        """Return how many blocks this layer needs for a sequence of `n_tokens`."""
        needed = math.ceil(n_tokens / BLOCK_TOKENS)
        return needed if self.max_blocks is None else min(needed, self.max_blocks)


@runtime_checkable
class DescribesCache(Protocol):
    """A model object that can describe its cache."""

    def cache_spec(self) -> ModelCacheSpec: ...


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """A model's cache of one sequence, layer by layer; see the model's `make_cache()`."""

    layers: tuple[LayerSpec, ...]
    reusable_tokens: int | None = None
    """The number of a prompt's first tokens whose cache does not depend on how prefill divides the
    prompt into chunks; None for all tokens. A request reuses only these tokens."""

    readers: ClassVar[list[Callable[[object], ModelCacheSpec | None]]] = []
    """Functions that return the spec of a framework's model object; the composition root adds one
    for each framework."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer")

    @classmethod
    def from_model(cls, model: object) -> ModelCacheSpec:
        """Return the spec of `model`: a framework's model object, or an object that describes its
        own cache. Raises InvalidRequestError if no reader recognises the object."""
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
        """The most KV heads of any layer."""
        return max(layer.kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """The largest key head size of any layer."""
        return max(layer.k_head_dim for layer in self.layers)

    def bytes_per_block(self, layer_id: int) -> int:
        """Bytes of one block of layer `layer_id`."""
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
        """The pool's name for the holder of the agent's blocks. Without a tenant the name is the
        agent's id; otherwise it contains a hash, so that a tenant cannot choose the name of another
        tenant's holder."""
        if not self.tenant:
            return self.agent_id
        return f"tenant:{digest('owner-v1', _utf8(self.tenant), _utf8(self.agent_id)).hex()}"


def _utf8(text: str) -> bytes:
    """Return `text` as bytes, even if it contains lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message)


def _is_filled_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limits the reasoning between the marks `start` and `end` to `tokens` in the whole answer. At
    the limit, the answer continues with `end_tokens`, the tokens of `end`. `opened` says that the
    prompt ends inside reasoning, and at least one more token of reasoning follows. Text from
    `call_start` to `call_end` or the answer's end is a call, not reasoning. If `only_first`, as for
    an answer with a grammar, only reasoning at the answer's beginning counts, and later marks are
    text. Raises InvalidRequestError if a mark is missing or `tokens` is too small (0, or 1 if
    `opened`)."""

    tokens: int
    start: str
    end: str
    end_tokens: tuple[int, ...]
    opened: bool = False
    call_start: str = ""
    call_end: str = ""
    only_first: bool = False

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
    """The marks `start` and `end` around an answer's reasoning. If `opened`, reasoning begins at
    the answer's first character."""

    start: str
    end: str
    opened: bool = False


_MAX_PENALTY = 2
"""The largest presence or frequency penalty, as in OpenAI's API."""


_LEAST_TEMPERATURE = 1e-6
"""A smaller temperature counts as 0: in fp32 its reciprocal may be infinite."""
_LEAST_TOP_P = 1e-4
"""A smaller `top_p` counts as 0: in fp32 the probabilities of a large vocabulary do not sum to
exactly 1, so the draw might find no token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token. The defaults mean greedy decoding.

    `top_p` 1, `top_k` 0 and `min_p` 0 mean off. `top_p` 0 and `temperature` 0 choose the most
    likely token. `seed` fixes the random draw at every position, in any batch and also after a
    preemption; None means a random seed. `logprobs` is the number of alternatives to report with
    each token's log-probability; None to report nothing. `logit_bias` maps token ids to values to
    add to their logits. The presence penalty lowers a token's logit once if the answer contains the
    token, the frequency penalty once per occurrence. If `ignore_eos`, an answer continues past the
    model's end tokens. `grammar` constrains the text. `prompt_logprobs` is `logprobs` for the
    prompt, which the engine then computes in full. `thinking` limits reasoning. `stop` strings have
    no effect in `thoughts`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    repetition_context: int = 20
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
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
    """The token that a backend chose for one sequence in one decode step. If `error` is not None,
    `token` is not valid, and the sequence cannot continue; `error` says why. If `finite` is False,
    the model computed NaN or infinite values, and the sequence's cache is not valid either."""

    sequence: SequenceId
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    finite: bool = True


class TokenEvent(NamedTuple):
    """A new token of a running request, and the text that became final with it; the text is empty
    while a character or a possible stop string is incomplete."""

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
    """The result of a finished request. `text` is the answer without end token and stop string;
    `tokens` are all generated tokens, the end token included. `blocks` is the agent's cache, valid
    until the agent's next request takes it or the engine evicts it. Even then, a request accepts
    `blocks`. The request reused `cached_tokens` of the `prompt_tokens`; `match` says why it reused
    no more. `stop_string` is the stop string that ended the answer, or None. `prompt_logprobs`, if
    requested, has one entry per prompt token; the first is None."""

    uid: str
    agent_id: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    blocks: AgentBlocks | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    match: MatchReport | None = None
    stop_string: str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PoolView:
    """The number of one agent's blocks in the pool, for each layer, and their bytes. Blocks that
    other agents share count too."""

    agent_id: str
    blocks_per_layer: tuple[int, ...]
    n_bytes: int

    @property
    def n_blocks(self) -> int:
        return sum(self.blocks_per_layer)
