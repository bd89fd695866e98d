"""Bodies on their way in: where they land until they are loaded, and what may be asked for.

The rules are those of `BatchBackend` and the same for every form of caches. Knows positions; what a
form's memory is, it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from semantic.domain.block_hash import Part
from semantic.domain.errors import BackendError, CacheReconstructionError
from semantic.domain.stored import BlockLayout
from semantic.domain.value_objects import BLOCK_TOKENS, whole_blocks

MemoryT = TypeVar("MemoryT")


@dataclass(slots=True)
class Landing(Generic[MemoryT]):
    """Memory that bodies are being written to, by layer or by kind of layers.

    `length` is how many tokens the sequence holds. WINDOW tokens land from position `window_start`
    on: their edge comes with the checkpoint and belongs before them.
    """

    length: int
    full_stop: int = 0
    full: dict[int, MemoryT] = field(default_factory=dict)
    window: dict[int, MemoryT] = field(default_factory=dict)
    window_start: int = 0
    window_stop: int = 0

    def require_next(self, start: int, layout: BlockLayout) -> None:
        """Raise BackendError unless FULL bodies may be loaded from `start` on."""
        if self.full_stop:
            raise BackendError("the tokens asked for before are still being loaded")
        if start != self.length:
            raise BackendError(f"loading from token {start} into a sequence of {self.length}")
        if start and layout.needs_checkpoint:
            raise BackendError("this model's caches can be loaded into an empty sequence only")

    def require_no_window(self) -> None:
        """Raise BackendError unless WINDOW bodies may be loaded."""
        if self.length or self.window_stop:
            raise BackendError("WINDOW bodies are loaded once, into an empty sequence")

    def require_loaded(self, length: int, checkpoint: bytes | None, layout: BlockLayout) -> None:
        """Raise CacheReconstructionError unless the sequence can hold `length` tokens now."""
        if not self.length <= length <= self.full_stop:
            raise CacheReconstructionError(
                f"tokens {self.length} to {self.full_stop} were loaded, not {length}"
            )
        if layout.needs_checkpoint and checkpoint is None:
            raise CacheReconstructionError(f"{length} tokens were loaded without a checkpoint")

    def require_window(self, tokens: range) -> None:
        """Raise CacheReconstructionError unless these tokens of a window were loaded."""
        if not self.window_start <= tokens.start < tokens.stop <= self.window_stop:
            raise CacheReconstructionError(
                f"the window needs tokens {tokens.start} to {tokens.stop}, but "
                f"{self.window_start} to {self.window_stop} were loaded"
            )


def require_block(length: int, part: Part, start: int, stop: int) -> None:
    """Raise BackendError unless `start` to `stop` is a body of a sequence of `length` tokens."""
    if part is Part.CHECKPOINT:
        raise BackendError("a checkpoint is no block; expected part FULL or WINDOW")
    if not 0 <= start < stop <= whole_blocks(start + 1):
        raise BackendError(f"tokens {start} to {stop} are not all of one block")
    if stop > length:
        raise BackendError(f"no tokens {start} to {stop} in a sequence of {length}")


def require_bodies(part: Part, start: int, stop: int) -> None:
    """Raise BackendError unless bodies can be loaded for `start` to `stop`."""
    if start % BLOCK_TOKENS or not 0 <= start < stop:
        raise BackendError(f"tokens {start} to {stop} do not begin with a block")
    if part is Part.CHECKPOINT:
        raise BackendError("a checkpoint is given to `loaded` as it is")
