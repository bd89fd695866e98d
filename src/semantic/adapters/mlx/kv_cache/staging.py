"""Memory for the block bodies that a sequence loads, and checks of the order of loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from semantic.adapters.mlx.kv_cache.checkpoint import Tree
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError, CacheReconstructionError
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import BLOCK_TOKENS, whole_blocks

MemoryT = TypeVar("MemoryT")


@dataclass(slots=True)
class Staging(Generic[MemoryT]):
    """Memory that receives block bodies of a sequence. The sequence has `length` tokens so far.

    `window_tokens` are the positions of the WINDOW bodies.
    """

    length: int
    full_stop: int = 0
    full: dict[int, MemoryT] = field(default_factory=dict)
    window: dict[int, MemoryT] = field(default_factory=dict)
    window_tokens: range = range(0)

    def require_next(self, start: int, layout: BlockLayout) -> None:
        """Raise BackendError unless FULL bodies can be loaded from position `start` on."""
        if self.full_stop:
            raise BackendError("earlier tokens are still loading")
        if start != self.length:
            raise BackendError(f"cannot load from token {start}: the sequence has {self.length}")
        if start and layout.needs_checkpoint:
            raise BackendError("this model's caches load only into an empty sequence")

    def require_no_window(self) -> None:
        """Raise BackendError unless WINDOW bodies can be loaded."""
        if self.length or self.window_tokens:
            raise BackendError("WINDOW bodies can load only once and only into an empty sequence")

    def require_loaded(self, length: int, checkpoint: bytes | None, layout: BlockLayout) -> None:
        """Raise CacheReconstructionError unless all data for `length` tokens is loaded."""
        if not self.length <= length <= self.full_stop:
            raise CacheReconstructionError(
                f"cannot use {length} tokens: tokens {self.length} to {self.full_stop} are loaded"
            )
        if layout.needs_checkpoint and checkpoint is None:
            raise CacheReconstructionError(f"cannot use {length} tokens without a checkpoint")

    def require_window(self, tokens: range) -> None:
        """Raise CacheReconstructionError unless WINDOW bodies with these tokens are loaded."""
        found = self.window_tokens
        if not found.start <= tokens.start < tokens.stop <= found.stop:
            raise CacheReconstructionError(
                f"the window needs tokens {tokens.start} to {tokens.stop}, but "
                f"got {found.start} to {found.stop}"
            )


class InPlace:
    """A `BodyTarget` in host memory."""

    def __init__(self, segments: Sequence[memoryview]) -> None:
        """`segments` hold 256 tokens each. `close` releases these segments."""
        self._segments = list(segments)

    def put(self, body: bytes | memoryview) -> None:
        room, at, data = sum(map(len, self._segments)), 0, memoryview(body)
        for segment in self._segments:
            n_bytes = len(segment) * len(data) // room
            segment[:n_bytes] = data[at : at + n_bytes]
            at += n_bytes
        self.close()

    def open(self) -> list[memoryview]:
        return self._segments

    def close(self, n_tokens: int = 0) -> None:  # noqa: ARG002
        for segment in self._segments:
            segment.release()  # MLX writes in place only while nothing else refers to an array
        self._segments = []


class Piece(NamedTuple):
    """A checkpoint's keys and values of one window layer, at positions `tokens`."""

    layer: int
    tokens: range
    tree: Tree


def blocks_in(tokens: range) -> int:
    """Return how many blocks `tokens` covers. `tokens` must begin at a block's first token."""
    return -(-len(tokens) // BLOCK_TOKENS)


def require_block(length: int, part: Part, start: int, stop: int) -> None:
    """Raise BackendError unless positions `start` to `stop` are in one block before `length`."""
    if part is Part.CHECKPOINT:
        raise BackendError("part must be FULL or WINDOW, got CHECKPOINT")
    if not 0 <= start < stop <= whole_blocks(start + 1):
        raise BackendError(f"tokens {start} to {stop} are not all in one block")
    if stop > length:
        raise BackendError(f"no tokens {start} to {stop} in a sequence of {length}")


def require_held(layer: int, held: range, tokens: range) -> None:
    """Raise BackendError unless the positions `held` contain `tokens`."""
    if not held.start <= tokens.start <= tokens.stop <= held.stop:
        raise BackendError(
            f"layer {layer} holds tokens {held.start} to {held.stop}, "
            f"not {tokens.start} to {tokens.stop}"
        )


def require_shape(shapes: Sequence[LayerShape | None], layer: int) -> LayerShape:
    """Return the shape of a layer's keys and values. Raises BackendError if the layer has none."""
    shape = shapes[layer]
    if shape is None:
        raise AssertionError(f"layer {layer} has no keys and values")
    return shape


def require_bodies(part: Part, start: int, stop: int) -> None:
    """Raise BackendError unless block bodies can hold exactly the tokens `start` to `stop`."""
    if start % BLOCK_TOKENS or not 0 <= start < stop:
        raise BackendError(f"tokens {start} to {stop} do not begin at a block's edge")
    if part is Part.CHECKPOINT:
        raise BackendError("a checkpoint is not a block body; pass it to `loaded`")
