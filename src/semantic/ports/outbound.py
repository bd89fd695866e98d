"""What the engine needs from the outside: a model that runs, its tokenizer, a clock.

Each docstring is a contract that every implementation, fakes included, is tested against.
What a backend puts into a block is `BlockData`; nothing on this side reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from semantic.domain.block_hash import Part
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.grammar import Grammar
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import (
    ModelCacheSpec,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenLogprob,
)


class Tokenizer(Protocol):
    """Text to token ids and back. Stateless: the same text always gives the same ids."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what a prompt's start needs (BOS)."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`. Bytes that are no complete character become U+FFFD."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation ({"role", "content"} each), by the model's chat template.

        Raises InvalidRequestError when there is no template or it refuses the messages.
        """
        ...


class BatchBackend(Protocol):
    """A loaded model that runs many sequences, each with a cache of its own.

    A sequence is opened empty or restored, prefilled in chunks, started, and then takes part in
    every `decode` until it is closed. One thread makes all calls. Every call either succeeds or
    raises BackendError and leaves the other sequences as they were.
    """

    @property
    def model_id(self) -> str:
        """Names what computes the cache: equal ids give equal keys and values."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def best_chunk(self) -> int:
        """Tokens of one `prefill` beyond which it gets no faster per token."""
        ...

    def cache_spec(self) -> ModelCacheSpec:
        """What the model keeps per sequence."""
        ...

    def set_aside(self, n_bytes: int) -> None:
        """Memory for blocks of `n_bytes` may be taken now: that is all that will be asked for.

        What was set aside before stays. Nothing has to be done; what is used counts either way.
        """
        ...

    def open(self, capacity: int) -> SequenceId:
        """A new empty sequence with room for `capacity` tokens, a multiple of 256."""
        ...

    def restore(
        self, blocks: AgentBlocks, length: int, capacity: int, *, exclusive: bool
    ) -> SequenceId:
        """A sequence that begins with the first `length` tokens of `blocks`.

        `exclusive` says that nobody else will read `blocks` again: their memory may be taken
        over, and `capacity` then counts it; whatever the blocks still refer to afterwards is the
        caller's to drop. Otherwise they are copied and stay as they are.
        Raises CacheReconstructionError when `blocks` cannot give those tokens.
        """
        ...

    def reserve(self, sequence: SequenceId, capacity: int) -> None:
        """Make room for `capacity` tokens (a multiple of 256); never less than there is."""
        ...

    def length(self, sequence: SequenceId) -> int:
        """Tokens in its cache."""
        ...

    def prefill(self, sequence: SequenceId, tokens: Sequence[int]) -> None:
        """Compute `tokens` after what the sequence holds; returns when they are in its cache."""
        ...

    def score(self, sequence: SequenceId, tokens: Sequence[int], n_top: int) -> list[TokenLogprob]:
        """Prefill all of `tokens` (two or more) but the last, and say how likely they were.

        The log-probability of each of them but the first, after all those before it, and the
        `n_top` likeliest in its place. The same calls on an empty sequence give the same bits,
        whatever else is open.
        """
        ...

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError, naming what is wrong, unless `grammar` can be enforced.

        Any thread may call it.
        """
        ...

    def start(
        self,
        sequence: SequenceId,
        last_token: int,
        history: Sequence[int],
        params: SamplingParams,
        drawn: int,
    ) -> None:
        """Let a prefilled sequence take part in decoding, beginning with `last_token`.

        `history` are the tokens before it and `drawn` how many tokens were sampled for this
        request before, so that penalties and seeds go on as if it had never been interrupted.
        `params.seed` is set unless the request is greedy; `params.grammar` was checked.
        """
        ...

    def decode(self) -> list[SampledToken]:
        """One step: one new token for each sequence that was started before the last step.

        One that was just started may be silent at first. With nothing started, no tokens.
        After a token is returned the cache holds it, so before every call each started
        sequence must have room for one token more than it holds, and one that was just started
        for two: its last prompt token and the first new one. A sequence whose grammar fails gets
        a token with an error; the others go on.
        """
        ...

    def extract(self, sequence: SequenceId, blocks: Sequence[Sequence[KVBlock]]) -> list[KVBlock]:
        """Close `sequence` and put its cache into `blocks` (its blocks, per layer, in order).

        It is closed also when this fails. Sets `start`, `token_count` and `layer_data`. Returns
        the blocks that were not needed; no memory is held for them. Copies nothing when every
        block was needed.
        """
        ...

    def close(self, sequence: SequenceId) -> None:
        """Drop `sequence` and its memory, at any time after it was opened."""
        ...

    # Bodies of blocks: bytes that a store keeps. Not for a sequence that is decoding.

    def layout(self) -> BlockLayout:
        """How a sequence's cache is cut into bodies."""
        ...

    def pause(self, sequence: SequenceId) -> None:
        """Take `sequence` out of decoding; it stays open with all that it holds.

        It can be exported then, prefilled with what comes next, and started again after that. The
        token that comes after the last one it holds is lost.
        """
        ...

    def export_block(self, sequence: SequenceId, part: Part, start: int, stop: int) -> bytes:
        """The body of tokens `start` to `stop`, all of one block, in bytes of the caller's own.

        `part` is FULL or WINDOW. Raises BackendError when the layers do not hold those tokens
        (any more).
        """
        ...

    def export_checkpoint(self, sequence: SequenceId) -> bytes:
        """What is needed, beside the bodies of its blocks, to go on from where `sequence` is.

        Of the WINDOW part those blocks are needed that lie wholly inside the window before its
        next token; where the window begins inside a block, the checkpoint holds that edge.
        """
        ...

    def loading(
        self, sequence: SequenceId, part: Part, start: int, stop: int
    ) -> list[list[memoryview]]:
        """Memory for tokens `start` to `stop`: for each block, for each segment, 256 tokens of it.

        `start` is a multiple of 256, and for FULL it is where the sequence ends now. There must
        be room. Any thread may write there until `loaded`; nothing reads it before. Let go of
        the views before calling `loaded`.
        """
        ...

    def loaded(self, sequence: SequenceId, length: int, checkpoint: bytes | None = None) -> None:
        """What `loading` gave is filled up to `length` tokens: the sequence holds them now.

        `checkpoint` is what was exported at that length, where the layout needs one. Raises
        CacheReconstructionError, leaving the sequence as it was before `loading`, when it
        does not belong to this model or position.
        """
        ...


class ModelProviderPort(Protocol):
    """Finds models and loads them."""

    def load_model(self, model_id: str) -> tuple[BatchBackend, Tokenizer]:
        """The model and tokenizer that `model_id` (a folder or a hub id) names.

        Raises ModelNotFoundError when there is none or it is broken, UnsupportedModelError when
        its cache cannot be managed.
        """
        ...

    def extract_spec(self, model: BatchBackend) -> ModelCacheSpec:
        """What `model` keeps per sequence."""
        ...


class Clock(Protocol):
    """Seconds from an arbitrary start, never going back."""

    def __call__(self) -> float: ...
