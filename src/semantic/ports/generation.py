"""The engine's ports: its own, and those of a backend, a tokenizer, a model provider and a clock.
Each docstring is a contract; tests hold every implementation to it, fakes included. Only the
backend reads the data in a block, `BlockData`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.grammar import Grammar
from semantic.domain.stored import BlockLayout, Body
from semantic.domain.value_objects import (
    CompletedGeneration,
    ModelCacheSpec,
    PrefillEvent,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenEvent,
    TokenLogprob,
)

EngineEvent = TokenEvent | PrefillEvent | CompletedGeneration


class GenerationEnginePort(Protocol):
    """Generates for many agents in one batch. Any thread may call `submit` and `cancel`, one thread
    `step` and `step_once`."""

    def submit(
        self,
        agent_id: str,
        prompt: str | Sequence[int],
        cache: AgentBlocks | None = None,
        max_tokens: int = 256,
        *,
        sampling: SamplingParams | None = None,
        append: bool = False,
        tenant: str = "",
        note: str = "",
        keep: bool = True,
    ) -> str:
        """Queue a request and return its uid.

        `prompt` is the whole prompt, as text or token ids; the engine reuses its longest prefix in
        `cache` or in the agent's own cache. With `append` the prompt follows the cached tokens
        instead. Agents of different tenants never share anything, even under the same name. `note`
        is opaque text saved with the agent. Without `keep` the request reuses caches and adds
        nothing to them, and its agent stays as it was.

        Raises InvalidRequestError (empty prompt, max_tokens below 1, a token id the model does not
        have, `append` without a cache), CacheReconstructionError (another model's cache) and
        PoolExhaustedError (could not fit even alone), before any state changes.
        """

    def cancel(self, uid: str) -> bool:
        """End a request at the next step; False if it is unknown or has ended."""

    def step(self) -> Iterator[CompletedGeneration]:
        """Run until no request remains, yielding each generation as it completes. The caller may
        submit more between two completions, or stop iterating and call again."""

    def step_once(self) -> list[EngineEvent]:
        """Run exactly one step; returns its events. Admits waiting requests, computes prefill
        chunks up to the budget, then decodes one token for every decoding request, including those
        that completed their prompt in this step."""


P = ParamSpec("P")
T = TypeVar("T")

Slices = Generator[Future[object] | None, None, T]
"""Work in slices that yields a future that the next slice waits for, or None. `close` ends it
between two slices."""


def at_once(work: Slices[T]) -> T:
    """Do all of `work`. Raises what it raises."""
    while True:
        try:
            awaited = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if awaited is not None:
            awaited.exception()  # waits for it; the work itself raises it


def done_at_once(work: Callable[P, Slices[T]]) -> Callable[P, T]:
    """A function that does all of `work`."""

    @functools.wraps(work)
    def run(*args: P.args, **named: P.kwargs) -> T:
        return at_once(work(*args, **named))

    return run


class Detokenizer(Protocol):
    """The text of one list of tokens, as the tokens come."""

    def push(self, token: int) -> str:
        """The text that is final with `token`; empty while a character is incomplete."""

    def flush(self) -> str:
        """The remaining text; incomplete bytes become U+FFFD, as `Tokenizer.decode` has them."""


class Tokenizer(Protocol):
    """Converts text to token ids and back. Stateless."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds those of a prompt's start (BOS)."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`. Bytes that form no complete character become U+FFFD."""

    def text_of(self, token: int) -> str:
        """The text of one token where it follows others."""

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer of tokens behind `after`. Its pieces together are their `decode`
        there."""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation ({"role", "content"} each), by the model's chat template.
        Raises InvalidRequestError if there is no template or it refuses the messages."""


class BodyTarget(Protocol):
    """The place for one block's body in a sequence that loads. One thread, any, calls `put`, or
    `open` and then `close`. The sequence may close meanwhile."""

    def put(self, body: bytes | memoryview) -> None:
        """Take the whole body. Raises BackendError."""

    def open(self) -> list[memoryview]:
        """Memory to write the body to: a few segments, 256 tokens of each. The body's segments lie
        one after another in them. Raises BackendError."""

    def close(self, n_tokens: int = 0) -> None:
        """Take the written body of `n_tokens`, or nothing, and free the memory. The caller may
        leave out `open`, and call it again. Raises BackendError."""


class BatchBackend(Protocol):
    """A loaded model that runs many sequences, each with a cache of its own.

    A sequence opens empty or restored, gets its prompt in chunks, starts, and takes part in every
    `decode` until it closes. One thread makes all calls. A call that fails raises BackendError and
    leaves the other sequences as they were.
    """

    @property
    def model_id(self) -> str:
        """Identifies the model by content: equal ids compute equal keys and values."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def best_chunk(self) -> int:
        """Tokens per `prefill` call beyond which the time per token does not fall."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the last `prefill`, `prefill_together` or `score` over the bytes before it,
        caches included; 0 if unknown."""

    @property
    def returns_memory(self) -> bool:
        """True if freed blocks return their memory, False if the backend keeps it for others."""

    def return_memory(self, room: int) -> bool:
        """Return kept memory of freed blocks to the system, if `room` bytes are enough to do so;
        return whether there was any. Open sequences go on."""

    def cache_spec(self) -> ModelCacheSpec:
        """The model's cache per sequence."""

    def set_aside(self, n_bytes: int) -> None:
        """Announce blocks of at most `n_bytes`: the backend may reserve memory now. Earlier
        reservations stay."""

    def open(self, capacity: int) -> SequenceId:
        """Open an empty sequence with memory for `capacity` tokens, a multiple of 256."""

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        """Open a sequence that holds the first `length` tokens of `blocks`. `exclusive`: nothing
        reads `blocks` again, so the sequence may adopt their memory, which `capacity` includes; the
        caller then drops its references. Otherwise the backend copies them. Raises
        CacheReconstructionError if `blocks` cannot provide the tokens."""

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        """Grow to `capacity` tokens (a multiple of 256); never shrinks."""

    def length(self, sequence: SequenceId) -> int:
        """Tokens in the sequence's cache."""

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """Compute `tokens` after those of the sequence; returns when they are in its cache."""

    def joins(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether `prefill_together` computes `n_tokens` of the sequence in a shared pass at
        about the cost of tokens of any other prompt."""

    @property
    def pads_chunks(self) -> bool:
        """True if chunks `side_by_side` may have different numbers of tokens; each then costs as
        much as the longest."""

    def side_by_side(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether `prefill_together` computes `n_tokens` of the sequence in one pass with
        those of others, which may take less time."""

    def prefill_together(self, chunks: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        """`prefill` of several sequences in one forward pass. Each `joins`, or all are
        `side_by_side`, with equally many tokens unless it `pads_chunks`. On BackendError none has
        grown."""

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        """Prefill `tokens` (two or more) except the last, and return their log-probabilities.
        Raises NotFiniteError instead of such log-probabilities. One entry for each token but the
        first, given those before it, with the `n_top` likeliest alternatives. The same calls on an
        empty sequence give the same bits, whatever else is open."""

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError, with the reason, unless a mask can hold it. Thread-safe."""

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
    ) -> None:
        """Add a prefilled sequence to the decode batch, with `last_token` as its next input.
        `history` are the tokens before it and `drawn` the number of tokens sampled for this request
        before, so that penalties and seeds continue as without a preemption. A request that is not
        greedy has `params.seed`; `params.grammar` has passed its check."""

    def decode(self) -> list[SampledToken]:
        """One decode step: one new token for each sequence started before the previous step.

        A sequence started since may return its first token one step later. A returned token counts
        as in the cache: before every call each started sequence needs capacity for one token more
        than it holds, and one just started for two, its last prompt token and the first new one. A
        sequence whose grammar fails gets a token with an error, one with NaN or infinite logits a
        token that is not finite; the others continue.
        """

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        """Close `sequence`, even on failure, and put its cache into `blocks` (per layer, in order):
        sets `start`, `token_count` and `layer_data`. Returns surplus blocks, which hold no memory.
        Copies nothing without surplus."""

    def close(self, sequence: SequenceId) -> None:
        """Free `sequence` and its memory, at any time."""

    # Block bodies: the bytes of blocks in a store. Not for a sequence that is decoding.

    def layout(self) -> BlockLayout:
        """The division of a sequence's cache into block bodies."""

    def pause(self, sequence: SequenceId) -> SampledToken | None:
        """Remove `sequence` from the decode batch; it stays open with its cache.

        The caller may then export, prefill and start it again. Returns the token that the next
        decode would have returned, if known: the cache lacks it. A caller that accepts it starts
        the sequence with it; otherwise the backend samples it again. Always returns one that is not
        finite: the sequence may hold such values.
        """

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> Body:
        """A copy of the body of tokens `start` to `stop`, all of one block. A deferred body is that
        of this moment, whatever happens to the sequence. `part` is FULL or WINDOW. Raises
        BackendError if the layers do not hold those tokens."""

    def is_finite(self, part: Part, body: bytes) -> bool:
        """Return whether an exported body of `part` has neither NaN nor infinite values."""

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        """Return the rest for resuming `sequence` here, besides the bodies of its blocks. Resuming
        needs WINDOW blocks only where they lie entirely inside the window before the next token;
        where the window begins inside a block, the checkpoint holds that edge."""

    def loading(self, sequence: SequenceId, part: Part, start: int, stop: int) -> list[BodyTarget]:
        """Return the targets of the bodies of tokens `start` to `stop`, one per block. `start` is a
        multiple of 256, and for FULL the current length of the sequence, which must have the
        capacity. The caller closes all targets, or drops them unused, before `loaded`; nothing
        reads them before."""

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        """Take the memory of `loading` into the cache, filled up to `length` tokens. `checkpoint`
        is the one exported at that length, if the layout needs one. Raises
        CacheReconstructionError, with the sequence as it was before `loading`, if the checkpoint is
        of another model or position."""


class GrammarProbe(Protocol):
    """Compiles one grammar at a time within limits, to learn its fault."""

    def problem(self, grammar: Grammar) -> str:
        """Return the fault of `grammar`, such as its cost; empty without one. Blocks. Raises
        CapacityError without a result, as after `stop`, and InvalidRequestError if the model's
        answers can follow no grammar."""

    def stop(self) -> None:
        """End `problem` soon. Any thread may call it at any time."""

    def close(self) -> None:
        """Release everything; call nothing meanwhile, nor afterwards."""


class ModelProviderPort(Protocol):
    """Finds models and loads them."""

    def load_model(
        self, model_id: str, adapter: Path | None = None
    ) -> tuple[BatchBackend, Tokenizer]:
        """Load the model and tokenizer of `model_id`, a folder or a hub id, under the adapter in a
        folder; models of the same files share weights. Raises ModelNotFoundError if there is none
        or it does not load, and UnsupportedModelError for an unsupported kind of cache."""

    def load_in_slices(
        self, model_id: str, adapter: Path | None = None, max_bytes: int | None = None
    ) -> Slices[tuple[BatchBackend, Tokenizer]]:
        """`load_model` in slices: the thread computes with other models between two. Raises
        WeightsTooLargeError, before it reads any weights, if they take more than `max_bytes` and no
        loaded model shares them."""

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        """Return the cache of `model` per sequence."""


class StepObserver(Protocol):
    """Learns the duration of an engine's steps, on the engine's thread; returns at once."""

    def stepped(self, seconds: float, n_decoding: int, *, prefilled: bool) -> None:
        """A step has ended: `n_decoding` requests decoded; `prefilled`: it computed prompts too."""


class Clock(Protocol):
    """Seconds from an arbitrary start, never going back."""

    def __call__(self) -> float: ...
