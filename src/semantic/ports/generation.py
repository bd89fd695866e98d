"""The engine's port, and the ports of a backend, a tokenizer, a model provider and a clock. Each
docstring is a contract; tests hold every implementation to it, fakes included. Only the backend
reads a block's data, `BlockData`."""

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
    """Generates for many agents in one batch. Any thread may call `submit` and `cancel`; only one
    thread may call `step` and `step_once`."""

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
        instead. Agents of different tenants never share anything, even with the same name. `note`
        is opaque text saved with the agent. Without `keep` the request reuses caches but adds
        nothing to them, and its agent stays as it was.

        Raises InvalidRequestError (empty prompt, max_tokens below 1, a token id the model does not
        know, `append` without a cache), CacheReconstructionError (another model's cache) and
        PoolExhaustedError (too large even for an empty pool), before any state changes.
        """

    def cancel(self, uid: str) -> bool:
        """End a request at the next step. Returns False if it is unknown or has finished."""

    def step(self) -> Iterator[CompletedGeneration]:
        """Run until no request remains, yielding each generation as it finishes. Between two
        results the caller may submit more requests, or stop iterating and call `step` again."""

    def step_once(self) -> list[EngineEvent]:
        """Run exactly one step and return its events. A step admits waiting requests, computes
        prefill chunks up to the budget, then decodes one token for every decoding request,
        including those that completed their prompt in this step."""


P = ParamSpec("P")
T = TypeVar("T")

Slices = Generator[Future[object] | None, None, T]
"""Work in slices. Each slice yields None, or a future that must be done before the next slice
begins. Calling `close` between two slices ends the work."""


def at_once(work: Slices[T]) -> T:
    """Do all of `work` at once and return its result. Raises the errors of `work`."""
    while True:
        try:
            awaited = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if awaited is not None:
            awaited.exception()  # waits; `work` itself raises the exception


def done_at_once(work: Callable[P, Slices[T]]) -> Callable[P, T]:
    """Return a function that does the work of all slices of `work` in one call."""

    @functools.wraps(work)
    def run(*args: P.args, **named: P.kwargs) -> T:
        return at_once(work(*args, **named))

    return run


class Detokenizer(Protocol):
    """Turns one list of tokens into text as the tokens arrive."""

    def push(self, token: int) -> str:
        """Add `token` and return the text that it completes, which may be empty."""

    def flush(self) -> str:
        """Return the text not returned yet; an incomplete character becomes U+FFFD, as in
        `Tokenizer.decode`."""


class Tokenizer(Protocol):
    """Converts text to token ids and back. Stateless."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; with `add_special_tokens`, after those that begin a
        prompt (BOS)."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`. Bytes that form no complete character become U+FFFD."""

    def text_of(self, token: int) -> str:
        """Return the text that `token` has after other tokens."""

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Return a new detokenizer for tokens that follow the tokens `after`. Its pieces, joined,
        equal the text that `decode` returns for these tokens after `after`."""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the model's chat template; each
        message has a "role" and a "content". Raises InvalidRequestError if the model has no
        template or the template refuses the messages."""


class BodyTarget(Protocol):
    """Memory for one block's body in a sequence that is loading. One thread, no matter which, calls
    either `put`, or `open` and then `close`. The sequence may be closed meanwhile."""

    def put(self, body: bytes | memoryview) -> None:
        """Store the whole body. Raises BackendError."""

    def open(self) -> list[memoryview]:
        """Return the memory to write the body to, with room for 256 tokens in each of the body's
        segments, in order. Raises BackendError."""

    def close(self, n_tokens: int = 0) -> None:
        """Use the written body of `n_tokens` tokens, or nothing if 0, and free the memory from
        `open`. The caller may call it without `open`, and more than once. Raises BackendError."""


class BatchBackend(Protocol):
    """A loaded model that runs many sequences, each with a cache of its own. A sequence opens empty
    or restored, gets its prompt in chunks, starts, and takes part in every `decode` until it
    closes. One thread makes all calls. A call that fails raises BackendError and leaves the other
    sequences as they were."""

    @property
    def model_id(self) -> str:
        """Identifies the model by content: models with equal ids compute equal keys and values."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids in the model's vocabulary."""

    @property
    def best_chunk(self) -> int:
        """The tokens per `prefill` call beyond which the time per token stays the same."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the last `prefill`, `prefill_together` or `score`, in bytes above the
        level before the call, including caches; 0 if unknown."""

    @property
    def returns_memory(self) -> bool:
        """True if freeing blocks returns their memory to the system; False if the backend keeps the
        memory for other blocks."""

    def return_memory(self, room: int) -> bool:
        """Give the kept memory of freed blocks back to the system if `room` spare bytes are enough
        to do so. Returns whether there was such memory. Open sequences stay valid."""

    def cache_spec(self) -> ModelCacheSpec:
        """Return the description of the model's cache for one sequence."""

    def set_aside(self, n_bytes: int) -> None:
        """Announce that blocks will need at most `n_bytes`: the backend may reserve the memory now.
        Earlier reservations stay."""

    def open(self, capacity: int) -> SequenceId:
        """Open an empty sequence with memory for `capacity` tokens, a multiple of 256."""

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        """Open a sequence that holds the first `length` tokens of `blocks`. If `exclusive`, nothing
        else reads `blocks`: the sequence takes over their memory, which `capacity` includes, and
        the caller drops its references. Otherwise the backend copies the blocks. Raises
        CacheReconstructionError if `blocks` cannot provide the tokens."""

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        """Grow the sequence to `capacity` tokens, a multiple of 256; it never shrinks."""

    def length(self, sequence: SequenceId) -> int:
        """Return the number of tokens in the sequence's cache."""

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """Compute the keys and values of `tokens`, which follow those in the sequence's cache;
        return once the cache contains them."""

    def joins(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether `prefill_together` can compute `n_tokens` of the sequence in one pass with
        other prompts, at about their cost per token."""

    @property
    def pads_chunks(self) -> bool:
        """True if chunks in a `side_by_side` pass may differ in length; each then costs as much as
        the longest."""

    def side_by_side(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether `prefill_together` can compute `n_tokens` of the sequence in one pass next
        to chunks of other sequences, which may save time."""

    def prefill_together(self, chunks: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        """Prefill several sequences in one forward pass. Either `joins` is true of every chunk, or
        `side_by_side` is, and all have the same length unless `pads_chunks` is true. After
        BackendError no sequence has grown."""

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        """Prefill all of `tokens` (two or more) except the last, and return log-probabilities: one
        entry for each token but the first, given the tokens before it, with the `n_top` likeliest
        alternatives. Raises NotFiniteError if a log-probability is not finite. The same calls on an
        empty sequence return the same bits, no matter what other sequences are open."""

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError, with the reason, if token masks cannot represent `grammar`.
        Thread-safe."""

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
    ) -> None:
        """Add a prefilled sequence to the decode batch, with `last_token` as its next input.
        `history` contains the tokens before it, and `drawn` is the number of tokens already sampled
        for this request, so that penalties and seeds continue as if there had been no preemption. A
        request that is not greedy has `params.seed`; `params.grammar` has passed its check."""

    def decode(self) -> list[SampledToken]:
        """One decode step: one new token for each sequence started before the previous step. A
        sequence started since the previous step may return its first token one step later. A
        returned token counts as part of the cache: before every call, each started sequence needs
        capacity for one more token than it holds, and a newly started one for two more: its last
        prompt token and its first new token. If a sequence's grammar fails, its token has an error;
        if its logits are NaN or infinite, its token is not finite; the other sequences continue."""

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        """Move the cache of `sequence` into `blocks` (per layer, in order) by setting their
        `start`, `token_count` and `layer_data`, and close the sequence, even on failure. Returns
        the blocks that were not needed, which hold no memory. Copies nothing if all were needed."""

    def close(self, sequence: SequenceId) -> None:
        """Free `sequence` and its memory. May be called at any time."""

    # Block bodies: the bytes of blocks in a store. Not for a sequence that is decoding.

    def layout(self) -> BlockLayout:
        """Return how a sequence's cache is divided into block bodies."""

    def pause(self, sequence: SequenceId) -> SampledToken | None:
        """Remove `sequence` from the decode batch; it stays open with its cache. The caller may
        then export, prefill and start it again. Returns the token that the next decode would have
        returned, which the cache lacks; None if it is not known. A caller that accepts the token
        starts the sequence with it; otherwise the backend samples it again. A token that is not
        finite is always returned, because the sequence may then hold invalid values."""

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> Body:
        """Return a copy of the body of tokens `start` to `stop`, all in one block. A deferred body
        too has the content as of this call, no matter what happens to the sequence later. `part` is
        FULL or WINDOW. Raises BackendError if the layers do not hold these tokens."""

    def is_finite(self, part: Part, body: bytes) -> bool:
        """Return whether an exported body of `part` is free of NaN and infinite values."""

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        """Return everything needed to resume `sequence` at its current length, except the bodies of
        its blocks. Resuming needs WINDOW blocks only if they lie entirely inside the window before
        the next token; if the window begins inside a block, the checkpoint holds this part of the
        block."""

    def loading(self, sequence: SequenceId, part: Part, start: int, stop: int) -> list[BodyTarget]:
        """Return targets for the bodies of tokens `start` to `stop`, one per block. `start` is a
        multiple of 256, and for FULL the current length of the sequence, which must have the
        capacity. Before `loaded`, the caller closes each target or drops it unused; nothing reads
        them earlier."""

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        """Add the bodies that `loading` received to the cache, which then holds `length` tokens.
        `checkpoint` was exported at that length; it is needed if the layout needs checkpoints. If
        it is from another model or position, raises CacheReconstructionError, with the sequence as
        it was before `loading`."""


class GrammarProbe(Protocol):
    """Compiles one grammar at a time, within limits, to find out whether it is usable."""

    def problem(self, grammar: Grammar) -> str:
        """Return the reason why `grammar` is not usable, such as its cost; empty if it is usable.
        Blocks. Raises CapacityError if the check did not finish, as after `stop`, and
        InvalidRequestError if the model's answers cannot follow grammars."""

    def stop(self) -> None:
        """Make a running call of `problem` end soon. Any thread may call it at any time."""

    def close(self) -> None:
        """Release everything; make no other call during or after it."""


class ModelProviderPort(Protocol):
    """Finds models and loads them."""

    def load_model(
        self, model_id: str, adapter: Path | None = None
    ) -> tuple[BatchBackend, Tokenizer]:
        """Load the model and tokenizer of `model_id`, a folder or a hub id, with the adapter in the
        folder `adapter`. Models loaded from the same files share their weights. Raises
        ModelNotFoundError if the model does not exist or does not load, and UnsupportedModelError
        for an unsupported kind of cache."""

    def load_in_slices(
        self, model_id: str, adapter: Path | None = None, max_bytes: int | None = None
    ) -> Slices[tuple[BatchBackend, Tokenizer]]:
        """Do the work of `load_model` in slices, so that the thread can compute with other models
        in between. Raises WeightsTooLargeError before it reads weights that need more than
        `max_bytes`, unless a loaded model shares them."""

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        """Return the description of `model`'s cache for one sequence."""


class StepObserver(Protocol):
    """Observes the duration of an engine's steps, on the engine's thread; must return at once."""

    def stepped(self, seconds: float, n_decoding: int, *, prefilled: bool) -> None:
        """Record a finished step of `seconds` in which `n_decoding` requests decoded; `prefilled`
        says whether it also computed prompts."""


class Clock(Protocol):
    """Returns seconds from an arbitrary start; never goes back."""

    def __call__(self) -> float: ...
