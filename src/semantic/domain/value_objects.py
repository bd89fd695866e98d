"""Values of the domain: cache specs of a model, sampling parameters, events of a request.
Immutable, compared by content. Knows no arrays, frameworks or files; sizes are in tokens or
bytes."""

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
"""A sequence that is open in a backend."""

BLOCK_TOKENS = 256
"""Tokens per block. MLX's own caches grow in steps of 256, so blocks and arrays end together."""


def whole_blocks(n_tokens: int) -> int:
    """`n_tokens` rounded up to the tokens of whole blocks."""
    return -(-n_tokens // BLOCK_TOKENS) * BLOCK_TOKENS


FinishReason = Literal["stop", "length", "cancelled", "error"]


class LayerKind(StrEnum):
    """The kind of a layer's cache. The values are those of configuration files and reports."""

    FULL = "global"
    """Every past token."""
    SLIDING_WINDOW = "sliding_window"
    """The last `window` tokens."""
    STATE = "state"
    """A state after the last token without a way back (recurrent, latent, mixed)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one layer per sequence. A STATE layer has 0 in `kv_heads`, `k_head_dim` and
    `v_head_dim`, and `state_bytes` per sequence, or per block when `state_grows`."""

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
        """Bytes of one block of this layer: K and V of 256 tokens, or the state."""
        if self.kind is LayerKind.STATE:
            return self.state_bytes
        per_token = self.kv_heads * (self.k_head_dim + self.v_head_dim) * self.itemsize
        return per_token * BLOCK_TOKENS

    @property
    def max_blocks(self) -> int | None:
        """The most blocks a sequence ever owns here; None when it grows with the sequence. A window
        owns the blocks that hold it, and one more when those leave less than half a block of room:
        tokens go there, and the window moves to the front only when the room is full, so the steps
        between share the cost of a move."""
        if self.kind is LayerKind.STATE:
            return None if self.state_grows else 1
        if self.window is None:
            return None
        blocks = math.ceil(self.window / BLOCK_TOKENS)
        room = blocks * BLOCK_TOKENS - self.window
        return blocks if room >= BLOCK_TOKENS // 2 else blocks + 1

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks this layer needs for a sequence of `n_tokens`."""
        needed = math.ceil(n_tokens / BLOCK_TOKENS)
        return needed if self.max_blocks is None else min(needed, self.max_blocks)


@runtime_checkable
class DescribesCache(Protocol):
    """A model object that describes its cache."""

    def cache_spec(self) -> ModelCacheSpec: ...


@dataclass(frozen=True, slots=True)
class ModelCacheSpec:
    """The cache of a model per sequence, layer by layer. Source: the model's `make_cache()`."""

    layers: tuple[LayerSpec, ...]
    reusable_tokens: int | None = None
    """Tokens up to which the cache does not depend on the division of the prompt; None for no
    limit. A request reuses nothing beyond."""

    readers: ClassVar[list[Callable[[object], ModelCacheSpec | None]]] = []
    """Readers of frameworks' model objects; the composition root adds one per framework."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a model needs at least one layer")

    @classmethod
    def from_model(cls, model: object) -> ModelCacheSpec:
        """The spec of `model`: one that describes its cache, or a framework's own model object.
        Raises InvalidRequestError if no reader recognises it."""
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
        """Return how many of a sequence's first `n_tokens` a request may reuse at most."""
        return n_tokens if self.reusable_tokens is None else min(n_tokens, self.reusable_tokens)

    @property
    def layer_types(self) -> tuple[LayerKind, ...]:
        return tuple(layer.kind for layer in self.layers)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of the widest layer."""
        return max(layer.kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """Key head size of the widest layer."""
        return max(layer.k_head_dim for layer in self.layers)

    def bytes_per_block(self, layer_id: int) -> int:
        """Bytes of one block of layer `layer_id`."""
        return self.layers[layer_id].bytes_per_block

    def blocks_for(self, n_tokens: int) -> tuple[int, ...]:
        """Blocks per layer for a sequence of `n_tokens`."""
        return tuple(layer.blocks_for(n_tokens) for layer in self.layers)

    def bytes_for(self, n_tokens: int) -> int:
        """Bytes of all blocks of a sequence of `n_tokens`."""
        return self.bytes_of(self.blocks_for(n_tokens))

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Bytes of `counts[layer]` blocks of each layer."""
        sizes = (layer.bytes_per_block for layer in self.layers)
        return sum(n * size for n, size in zip(counts, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The key of an agent's idle cache: unique by model, tenant and agent."""

    model_id: str
    agent_id: str
    tenant: str = ""

    @property
    def owner(self) -> str:
        """The pool's name for the holder of the agent's blocks: the agent's id if it has no tenant.
        It has a hash of a tenant's agent, so that a tenant cannot choose another's."""
        if not self.tenant:
            return self.agent_id
        return f"tenant:{digest('owner-v1', _utf8(self.tenant), _utf8(self.agent_id)).hex()}"


def _utf8(text: str) -> bytes:
    """`text` in bytes, whatever it holds."""
    return text.encode("utf-8", "surrogatepass")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidRequestError(message)


def _is_filled_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `tokens` of an answer between the marks `start` and `end`, in all its reasoning.

    At the limit the answer continues with `end_tokens`, the tokens of `end`. `opened`: the prompt
    ends inside reasoning, and at least one token of it follows. Text between `call_start` and
    `call_end`, or the answer's end, is a call, not reasoning. `only_first`: an answer in a grammar
    has reasoning at its beginning alone; later marks are text. Raises InvalidRequestError for fewer
    tokens and for a missing mark of reasoning.
    """

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
    """Where the reasoning of an answer is: between the marks `start` and `end`, and from its first
    character if the prompt `opened` it."""

    start: str
    end: str
    opened: bool = False


_MAX_PENALTY = 2
"""As in OpenAI's interface: the largest penalty per occurrence."""


_LEAST_TEMPERATURE = 1e-6
"""Smaller temperatures are 0: in fp32 their reciprocal may be infinite."""
_LEAST_TOP_P = 1e-4
"""A smaller `top_p` is 0: in fp32 the probabilities of a large vocabulary do not sum up exactly,
and no token could be left to draw."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The choice of the next token. The defaults are greedy decoding.

    `top_p` of 1, `top_k` of 0 and `min_p` of 0 mean off. `top_p` of 0 is the most likely token, as
    is a `temperature` of 0. `seed` fixes the draw of every position, in any batch and over a
    preemption; None draws one. `logprobs` is None for none, else the number of alternatives to
    report with each token. `logit_bias` maps token ids to addends of their logits. The penalties of
    presence and frequency lower the logits of tokens that the answer contains, once or for each
    occurrence. With `ignore_eos` an answer continues after the model's end tokens. `grammar`
    constrains the text. `prompt_logprobs` means `logprobs` for the prompt, which the engine then
    computes whole. `thinking` limits reasoning. `stop` strings have no effect in `thoughts`.
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
            f"stop must hold strings that are not empty, got {self.stop!r}",
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
        """True if every token is the most likely one."""
        return self.temperature < _LEAST_TEMPERATURE or self.top_p < _LEAST_TOP_P


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability (natural log) and those of the likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """The choice of a backend for one sequence in one decode step. `error` is the reason why
    `token` is not valid: the sequence cannot continue. Without `finite` the model computed NaN or
    infinite values, and the sequence's cache is not valid either."""

    sequence: SequenceId
    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    finite: bool = True


class TokenEvent(NamedTuple):
    """A token of a running request, and its final text: empty while a character or a possible stop
    string is incomplete."""

    uid: str
    agent_id: str
    token: int
    text: str
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PrefillEvent:
    """A request's cache has `done` of `total` prompt tokens; none after a preemption."""

    uid: str
    agent_id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class CompletedGeneration:
    """A request's end.

    `text` is the answer without end token and stop string; `tokens` are all tokens generated, the
    end token included. `blocks` is the agent's cache, valid until the agent's next request begins
    or evicts it; passing it to a later request is always safe. The request reused `cached_tokens`
    of the `prompt_tokens`; `match` has the reason for no more. `stop_string` ended the answer, if
    any. `prompt_logprobs`, if requested, has an entry for each prompt token; the first is None.
    """

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
    """One agent's holdings in the pool: blocks per layer and bytes, shared blocks included."""

    agent_id: str
    blocks_per_layer: tuple[int, ...]
    n_bytes: int

    @property
    def n_blocks(self) -> int:
        return sum(self.blocks_per_layer)
