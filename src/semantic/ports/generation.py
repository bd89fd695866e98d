"""The engine's port, and the ports of a backend, a tokenizer, a model provider and a clock. Each
docstring is a contract; tests check it for every implementation, fakes included. Only the backend
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
        nothing to them, and the agent does not change.

        Raises errors before any state changes: InvalidRequestError (empty prompt, `max_tokens`
        below 1, unknown token id, `append` without a cache), CacheReconstructionError (another
        model's cache) and PoolExhaustedError (too large even for an empty pool).
        """

    def cancel(self, uid: str) -> bool:
        """End a request at the next step. Returns False for an unknown or finished request."""

    def step(self) -> Iterator[CompletedGeneration]:
        """Run until no request remains, yielding each finished generation. Between two results the
        caller may submit more requests, or stop the iteration and call `step` again."""

    def step_once(self) -> list[EngineEvent]:
        """Run exactly one step and return its events. A step admits waiting requests, computes
        prefill chunks up to the budget, and decodes one token per decoding request. Requests that
        complete their prompt in this step decode too."""


P = ParamSpec("P")
T = TypeVar("T")

Slices = Generator[Future[object] | None, None, T]
"""Work in slices. Each slice yields None, or a future that must be done before the next slice
begins. Calling `close` between two slices ends the work."""


def at_once(work: Slices[T]) -> T:
    """Do all slices of `work` in one call and return the result. Raises the errors of `work`."""
    while True:
        try:
            awaited = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if awaited is not None:
            awaited.exception()  # waits; `work` itself raises the exception


def done_at_once(work: Callable[P, Slices[T]]) -> Callable[P, T]:
    """Return a function that calls `work` and does all of its slices at once."""

    @functools.wraps(work)
    def run(*args: P.args, **named: P.kwargs) -> T:
        return at_once(work(*args, **named))

    return run


class Detokenizer(Protocol):
    """Turns a growing list of tokens into text, token by token."""

    def push(self, token: int) -> str:
        """Add `token` and return the newly complete text, which may be empty."""

    def flush(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD, as in
        `Tokenizer.decode`."""


class Tokenizer(Protocol):
    """Converts text to token ids and back. Stateless."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; with `add_special_tokens`, after the tokens that begin a
        prompt (BOS)."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`. Bytes of an incomplete character become U+FFFD."""

    def text_of(self, token: int) -> str:
        """Return the text of `token` in the middle of a text, after other tokens."""

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Return a new detokenizer for tokens that follow the tokens `after`. The joined pieces
        equal the text that `decode` gives for the new tokens after `after`."""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation, rendered with the model's chat template; each
        message has a "role" and a "content". Raises InvalidRequestError if the model has no
        template or the template refuses the messages."""


class BodyTarget(Protocol):
    """Memory for one block's body in a sequence that is loading. One thread, which may be any
    thread, calls either `put`, or `open` and then `close`. The sequence may already be closed."""

    def put(self, body: bytes | memoryview) -> None:
        """Store the whole body. Raises BackendError."""

    def open(self) -> list[memoryview]:
        """Return memory for the body: one view per segment of the body, in order, each with space
        for 256 tokens. Raises BackendError."""

    def close(self, n_tokens: int = 0) -> None:
        """Use `n_tokens` tokens of the written body, or nothing for 0, and free the memory from
        `open`. The caller may call `close` without `open`, and repeatedly. Raises BackendError."""


class BatchBackend(Protocol):
    """A loaded model that runs many sequences, each with its own cache. A sequence opens empty or
    restored, gets its prompt in chunks, starts, and takes part in every `decode` until it closes.
    One thread makes all calls. A failed call raises BackendError and does not change other
    sequences."""

    @property
    def model_id(self) -> str:
        """An id of the model's content: models with equal ids compute equal keys and values."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids in the model's vocabulary."""

    @property
    def best_chunk(self) -> int:
        """Tokens per `prefill` call above which the time per token no longer falls."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the last `prefill`, `prefill_together` or `score`, in bytes above the
        level before the call, including caches; 0 if unknown."""

    @property
    def returns_memory(self) -> bool:
        """True if the backend returns the memory of freed blocks to the system; False if it keeps
        that memory for other blocks."""

    def return_memory(self, room: int) -> bool:
        """Give the kept memory of freed blocks back to the system, if moving the used blocks takes
        at most `room` bytes. Returns whether there was kept memory. Open sequences stay valid."""

    def cache_spec(self) -> ModelCacheSpec:
        """Return the description of the model's cache for one sequence."""

    def set_aside(self, n_bytes: int) -> None:
        """Announce that blocks will need at most `n_bytes`; the backend may reserve this memory
        now. Does not undo earlier reservations."""

    def open(self, capacity: int) -> SequenceId:
        """Open an empty sequence with memory for `capacity` tokens, a multiple of 256."""

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        """Open a sequence that holds the first `length` tokens of `blocks`. If `exclusive`, only
        this call reads `blocks`: the sequence takes over their memory, which `capacity` includes,
        and the caller drops its references. Otherwise the backend copies the blocks. Raises
        CacheReconstructionError if `blocks` cannot provide the tokens."""

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        """Grow the sequence's memory to `capacity` tokens, a multiple of 256; never shrink it."""

    def length(self, sequence: SequenceId) -> int:
        """Return the number of tokens in the sequence's cache."""

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """Compute the keys and values of `tokens`, which follow the tokens in the sequence's cache;
        return once the cache contains `tokens`."""

    def joins(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether `prefill_together` can compute `n_tokens` of the sequence in one pass with
        other prompts. A token of the sequence then costs about as much as a prompt's token."""

    @property
    def pads_chunks(self) -> bool:
        """True if chunks in a `side_by_side` pass may differ in length; each chunk then costs as
        much as the longest."""

    def side_by_side(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return whether `prefill_together` can compute `n_tokens` of the sequence in one pass
        beside chunks of other sequences. Such a pass may save time."""

    def prefill_together(self, chunks: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        """Prefill several sequences in one forward pass. Either `joins` is true for every chunk, or
        `side_by_side` is true for every chunk. In the second case the lengths are equal, or
        `pads_chunks` is true. After BackendError no sequence has grown."""

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        """Prefill all of `tokens` (at least two) except the last. Return the log-probability of
        each token from the second on, given the tokens before it, with the `n_top` likeliest
        alternatives. Raises NotFiniteError if a log-probability is not finite. The same calls on an
        empty sequence return the same bits; other open sequences do not matter."""

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError, with the reason, for a `grammar` that token masks cannot
        represent. Thread-safe."""

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
    ) -> None:
        """Add a prefilled sequence to the decode batch, with `last_token` as its next input.
        `history` has the tokens before `last_token`, and `drawn` counts the tokens already sampled
        for this request. So penalties and seeds continue after a preemption. `params.seed` is set
        unless the request is greedy. `params.grammar` has passed `check_grammar`."""

    def decode(self) -> list[SampledToken]:
        """Decode one new token for each sequence started before the previous step. A sequence
        started later may return its first token one step later. A returned token counts as part of
        the cache. Before every call, each started sequence needs capacity for one token more than
        its cache holds. A newly started sequence needs capacity for two more: its last prompt token
        and its first new token. If a sequence's grammar fails, its token has an error. If its
        logits are NaN or infinite, its token is not finite. In both cases the other sequences
        continue."""

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        """Move the cache of `sequence` into `blocks` (per layer, in order) by setting their
        `start`, `token_count` and `layer_data`, and close the sequence, even on failure. Returns
        the unused blocks, which hold no memory. Copies nothing if it uses all blocks."""

    def close(self, sequence: SequenceId) -> None:
        """Free `sequence` and its memory. The caller may close a sequence at any time."""

    # Block bodies: the bytes of blocks in a store. Not for a sequence that is decoding.

    def layout(self) -> BlockLayout:
        """Return how the backend divides a sequence's cache into block bodies."""

    def pause(self, sequence: SequenceId) -> SampledToken | None:
        """Remove `sequence` from the decode batch; it stays open with its cache. The caller may
        then export, prefill and restart it. Returns the token that the next `decode` would have
        returned, which the cache lacks; None for an unknown token. A caller that accepts the token
        starts the sequence with this token; otherwise the backend samples again. If the token is
        not finite, always returns the token: the sequence may hold invalid values."""

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> Body:
        """Return a copy of the body of tokens `start` to `stop`, all in one block. A deferred body
        also has the content at the time of this call, even if the sequence changes later. `part` is
        FULL or WINDOW. Raises BackendError if the layers do not hold these tokens."""

    def is_finite(self, part: Part, body: bytes) -> bool:
        """Return whether `body`, an exported body of `part`, has only finite values."""

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        """Return everything needed to resume `sequence` at its current length, except the bodies of
        its blocks. Resuming needs only WINDOW blocks that lie entirely inside the window before the
        next token. If the window begins inside a block, the checkpoint holds the block's part
        inside the window."""

    def loading(self, sequence: SequenceId, part: Part, start: int, stop: int) -> list[BodyTarget]:
        """Return one target per block for the bodies of tokens `start` to `stop`. `start` is a
        multiple of 256. For FULL, `start` is the sequence's current length, and the sequence must
        have the capacity. Before `loaded`, the caller closes each used target. The backend reads
        targets only in `loaded`."""

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        """Add the bodies that `loading` received to the cache, which then holds `length` tokens.
        `checkpoint`, exported at that length, is required if the layout needs checkpoints. For a
        checkpoint of another model or position, raises CacheReconstructionError and undoes
        `loading`."""


class GrammarProbe(Protocol):
    """Compiles one grammar at a time, within limits, to find out whether the engine can use it."""

    def problem(self, grammar: Grammar) -> str:
        """Return the reason why `grammar` is not usable, such as its cost; "" for a usable grammar.
        The call blocks. Raises CapacityError for an unfinished check, as after `stop`, and
        InvalidRequestError if the model's answers cannot follow grammars."""

    def stop(self) -> None:
        """Make a running call of `problem` end soon. Any thread may call `stop` at any time."""

    def close(self) -> None:
        """Release all resources. During and after `close`, make no other call."""


class ModelProviderPort(Protocol):
    """Finds models and loads them."""

    def load_model(
        self, model_id: str, adapter: Path | None = None
    ) -> tuple[BatchBackend, Tokenizer]:
        """Load the model and tokenizer of `model_id`, a folder or a hub id, with the adapter in the
        folder `adapter`. Models loaded from the same files share their weights. Raises
        ModelNotFoundError if the model is missing or does not load, and UnsupportedModelError for
        an unsupported kind of cache."""

    def load_in_slices(
        self, model_id: str, adapter: Path | None = None, max_bytes: int | None = None
    ) -> Slices[tuple[BatchBackend, Tokenizer]]:
        """Do the work of `load_model` in slices, between which the thread can compute with other
        models. Raises WeightsTooLargeError, before reading weights, if weights that no loaded model
        shares need more than `max_bytes`."""

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        """Return the description of `model`'s cache for one sequence."""


class StepObserver(Protocol):
    """Observes the duration of an engine's steps, on the engine's thread; must return at once."""

    def stepped(self, seconds: float, n_decoding: int, *, prefilled: bool) -> None:
        """Record a finished step of `seconds` in which `n_decoding` requests decoded; `prefilled`
        is true if the step also computed prompts."""


class Clock(Protocol):
    """Returns seconds from an arbitrary start; never goes back."""

    def __call__(self) -> float: ...
