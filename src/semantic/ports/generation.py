"""The engine's port, and the ports of a backend, a tokenizer, a model provider and a clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.grammar import Grammar
from semantic.domain.stored import BlockLayout, Body
from semantic.domain.value_objects import (
    CompletedGeneration,
    KvBits,
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
    """Generates for many agents in one batch. Any thread may call `submit` and `cancel`. Only one
    thread may call the other methods."""

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

        `prompt` is the whole prompt, as text or token ids. With `append`, it follows the cached
        tokens instead. Tenants never share anything. Without `keep`, the request reuses caches but
        changes nothing.

        Errors leave the state unchanged. Raises InvalidRequestError for invalid arguments,
        CacheReconstructionError for another model's cache, and PoolExhaustedError if the request
        never fits in the pool.
        """

    def cancel(self, uid: str) -> bool:
        """End a request at the next step. Returns False for an unknown request."""

    def step(self) -> Iterator[CompletedGeneration]:
        """Run until all requests have finished, and yield each finished generation. The caller may
        submit requests meanwhile. It may also stop the iteration and call this again."""

    def step_once(self) -> list[EngineEvent]:
        """Run exactly one step and return the step's events. A step admits waiting requests,
        prefills chunks up to the budget, and decodes one token per request."""


P = ParamSpec("P")
T = TypeVar("T")

Slices = Generator[Future[object] | None, None, T]
"""Work that is done in slices. A yielded future must be done before the next slice begins. Calling
`close` ends the work."""


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
    """Return a function that does all slices of `work` in one call."""

    @functools.wraps(work)
    def run(*args: P.args, **named: P.kwargs) -> T:
        return at_once(work(*args, **named))

    return run


class Detokenizer(Protocol):
    """Turns a growing list of tokens into text, token by token."""

    def push(self, token: int) -> str:
        """Add `token` and return the newly complete text, possibly ""."""

    def flush(self) -> str:
        """Return the remaining text. An incomplete character becomes U+FFFD."""


class Tokenizer(Protocol):
    """Converts text to token ids and token ids to text. Stateless."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. `add_special_tokens` adds ids that begin a prompt."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`. An incomplete character becomes U+FFFD."""

    def text_of(self, token: int) -> str:
        """Return the text that `token` has inside a text."""

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for the tokens that follow `after`. The texts that it returns add up
        to the text from `decode`."""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation. Each message has a "role" and a "content". Raises
        InvalidRequestError if the model has no template or its template refuses the messages."""


class BodyTarget(Protocol):
    """Memory for one block's body in a sequence. One thread calls either `put`, or `open` and then
    `close`. This is safe after the sequence is closed."""

    def put(self, body: bytes | memoryview) -> None:
        """Store the whole body of the block. Raises BackendError."""

    def open(self) -> list[memoryview]:
        """Return memory for the body, as one view per segment. The memory has space for 256 tokens.
        Raises BackendError."""

    def close(self, n_tokens: int = 0) -> None:
        """Free the memory from `open`. The sequence keeps the first `n_tokens` tokens of the body.
        Idempotent. Raises BackendError."""


class Draft(NamedTuple):
    """Tokens that may come next. Each one is right with probability `chance` if all before it
    are."""

    tokens: Sequence[int]
    chance: float


class Drafter(Protocol):
    """Drafts a sequence's next tokens. Each call takes at most 0.1 ms, on the engine's thread."""

    def propose(self, most: int) -> Draft:
        """Return at most `most` tokens that may follow the tokens read so far."""

    def read(self, tokens: Sequence[int], n_drafted: int, /) -> None:
        """Take the sequence's next `tokens`. The step that sampled them checked `n_drafted` drafts,
        and all `tokens` but the last were drafts."""


class DraftSource(Protocol):
    """A model's source of drafts. Any thread may make the calls, and all return at once."""

    def drafter(self, tenant: str, tokens: Sequence[int], predicted: Sequence[int] = ()) -> Drafter:
        """Return a drafter for a sequence with `tokens`, after which `predicted` may follow. Uses
        nothing of other tenants."""

    def add(self, tenant: str, tokens: Sequence[int]) -> None:
        """Use `tokens` for later drafts of the tenant."""

    def recall(self, saved: Callable[[str], Iterator[Sequence[int]]]) -> None:
        """Begin each tenant's drafts with the tokens of its `saved` agents, newest first. A thread
        of the source calls `saved`."""

    def forget(self, tenant: str) -> None:
        """Forget everything of a tenant, and begin with its saved agents again."""

    def close(self) -> None:
        """End all work. Make no other call afterwards."""


class BatchBackend(Protocol):
    """A loaded model that runs many sequences, each with its own cache. One thread makes all calls.
    A failed call raises BackendError and does not change other sequences."""

    @property
    def model_id(self) -> str:
        """An id of the model's content. Models with equal ids compute equal keys and values."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def best_chunk(self) -> int:
        """The number of tokens per `prefill` call above which a token does not become cheaper."""

    @property
    def peak_bytes(self) -> int:
        """The peak memory in bytes of the last `prefill`, `prefill_together` or `score`, above the
        level before the call. 0 if unknown."""

    @property
    def unused_bytes(self) -> int | None:
        """The bytes that `return_memory` gives back; None if freed blocks' memory needs no call."""

    def return_memory(self, room: int) -> bool:
        """Give the memory of freed blocks back to the system. May take at most `room` bytes to move
        the used blocks. Returns False if all freed memory is already back."""

    def cache_spec(self) -> ModelCacheSpec:
        """Return the description of a sequence's cache."""

    @property
    def shared_layers(self) -> Sequence[bool]:
        """For each layer, True if restored sequences share the memory of their whole blocks."""

    def set_aside(self, n_bytes: int) -> None:
        """Announce that all blocks need at most `n_bytes`. The backend may reserve them now."""

    def open(self, capacity: int) -> SequenceId:
        """Open an empty sequence with memory for `capacity` tokens, which is a multiple of 256."""

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        """Open a sequence with the first `length` tokens of `blocks`. With `exclusive`, the
        sequence takes over the memory of `blocks`; `capacity` includes their tokens. Raises
        CacheReconstructionError if `blocks` lack the tokens."""

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        """Grow the sequence's memory to `capacity` tokens. `capacity` is a multiple of 256."""

    def length(self, sequence: SequenceId) -> int:
        """Return the number of cached tokens of the sequence."""

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """Append the keys and values of `tokens` to the sequence's cache."""

    def joins(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return True if `prefill_together` can join `n_tokens` of the sequence and other prompts
        in one pass."""

    @property
    def pads_chunks(self) -> bool:
        """True if chunks of a `side_by_side` pass may differ in length. Each chunk then costs as
        much as the longest one."""

    def side_by_side(self, sequence: SequenceId, n_tokens: int) -> bool:
        """Return True if `prefill_together` can compute `n_tokens` of the sequence beside chunks of
        other sequences. This may save time."""

    def prefill_together(self, chunks: Sequence[tuple[SequenceId, Sequence[int]]]) -> None:
        """Prefill several sequences in one forward pass. Either all chunks satisfy `joins`, or all
        satisfy `side_by_side`. Side by side, chunks have equal lengths unless `pads_chunks`. After
        a BackendError all sequences have their old lengths."""

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        """Prefill `tokens` except the last one. There must be at least two. Returns the
        log-probability of each token but the first, with `n_top` alternatives. Raises
        NotFiniteError if a log-probability is not finite."""

    @property
    def drafts_problem(self) -> str:
        """The reason why `start` ignores drafters, or ""."""

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError for a `grammar` that token masks cannot represent.
        Thread-safe."""

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
        drafter: Drafter | None = None,
    ) -> None:
        """Add a prefilled sequence to the decode batch. Its next input is `last_token`. `history`
        has the earlier tokens; `drawn` is the number of tokens sampled so far. `params.seed` is set
        unless the request is greedy. `params.grammar` has passed `check_grammar`. A backend may
        ignore `drafter`; drafts do not change tokens."""

    def decode(self) -> list[SampledToken]:
        """Decode one new token per started sequence. A new sequence's first token may come one step
        later. Each sequence needs capacity for one more token, a new one for two. A failed grammar
        or logits that are not finite affect only their own sequence."""

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        """Move the cache of `sequence` into `blocks` and close the sequence. A failure also closes
        it. Returns the unused blocks, which have no memory."""

    def close(self, sequence: SequenceId) -> None:
        """Free `sequence` and its memory. Allowed at any time."""

    # Block bodies: the bytes of blocks in a store. Not for a sequence that is decoding.

    def layout(self) -> BlockLayout:
        """Return how the backend divides a sequence's cache into blocks."""

    def pause(self, sequence: SequenceId) -> SampledToken | None:
        """Remove `sequence` from the decode batch. It stays open with its cache. Returns the token
        that `decode` would return next, or None if unknown. The caller may start the sequence with
        this token. A token from logits that are not finite is always known."""

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> Body:
        """Return a copy of the body of one block, from token `start` to token `stop`. `part` is
        FULL or WINDOW. Raises BackendError if the layers lack these tokens."""

    def is_finite(self, part: Part, body: bytes) -> bool:
        """Return True if an exported block's body has only finite values."""

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        """Return the state needed to resume `sequence` at its current length, besides its blocks.
        Resuming needs only the WINDOW blocks that are entirely inside the window."""

    def loading(self, sequence: SequenceId, part: Part, start: int, stop: int) -> list[BodyTarget]:
        """Return one target per block, for the bodies of tokens `start` to `stop`. `start` is a
        multiple of 256. For FULL, `start` is the current length. The caller must close each used
        target before it calls `loaded`."""

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        """Add the block bodies from `loading` to the cache. The cache then has `length` tokens.
        `checkpoint` is required if the layout needs one. Another model's checkpoint raises
        CacheReconstructionError and undoes `loading`."""


class GrammarProbe(Protocol):
    """Compiles one grammar at a time. Limits the time and memory of each compilation."""

    def problem(self, grammar: Grammar) -> str:
        """Return the reason that `grammar` is not usable, or "". Blocks. Raises CapacityError for
        an unfinished check, and InvalidRequestError if the model cannot follow grammars."""

    def stop(self) -> None:
        """Make a running call of `problem` end soon. Any thread may call this."""

    def close(self) -> None:
        """Release all resources. Make no other call afterwards."""


class ModelProviderPort(Protocol):
    """Finds models and loads them."""

    def load_model(
        self, model_id: str, adapter: Path | None = None, *, kv_bits: KvBits = 16
    ) -> tuple[BatchBackend, Tokenizer]:
        """Load a model and its tokenizer, with the adapter in the folder `adapter`. Models from the
        same files share weights. Raises ModelNotFoundError if loading fails, and
        UnsupportedModelError for an unsupported kind of cache, or one that cannot have
        `kv_bits`."""

    def load_in_slices(
        self,
        model_id: str,
        adapter: Path | None = None,
        max_bytes: int | None = None,
        *,
        kv_bits: KvBits = 16,
    ) -> Slices[tuple[BatchBackend, Tokenizer]]:
        """Do the work of `load_model` in slices. Raises WeightsTooLargeError if the new weights
        exceed `max_bytes`. Weights that a loaded model shares do not count."""

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        """Return the description of a sequence's cache."""


class StepObserver(Protocol):
    """Observes the duration of an engine's steps. The engine's thread calls this, so it must return
    at once."""

    def stepped(self, seconds: float, n_decoding: int, *, prefilled: bool) -> None:
        """Record a step that took `seconds`. In the step, `n_decoding` requests decoded.
        `prefilled` is true if the step also computed prompts."""


class Clock(Protocol):
    """Returns seconds from an arbitrary start. The seconds never decrease."""

    def __call__(self) -> float: ...
