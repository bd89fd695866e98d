"""BlockPool: reference-counted blocks of one model within a budget of blocks or bytes."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from semantic.domain.entities import BlockId, KVBlock
from semantic.domain.errors import IntegrityError, InvalidRequestError, PoolExhaustedError
from semantic.domain.value_objects import ModelCacheSpec, PoolView

_numbers = itertools.count()
"""Numbers for the blocks of all pools."""


class BlockPool:
    """Allocates blocks of one model to agents, each for 256 tokens of one layer. Thread-safe.

    A block may have several holders and is free without any. It is evictable if all references to
    it are marked with `mark_evictable`.
    """

    def __init__(
        self, spec: ModelCacheSpec, total_blocks: int | None = None, *, max_bytes: int | None = None
    ) -> None:
        if total_blocks is None and max_bytes is None:
            raise InvalidRequestError("a pool needs total_blocks or max_bytes")
        if total_blocks is not None and total_blocks < 1:
            raise InvalidRequestError(f"total_blocks must be at least 1, got {total_blocks}")
        if max_bytes is not None and max_bytes < 1:
            raise InvalidRequestError(f"max_bytes must be at least 1, got {max_bytes}")
        self.spec = spec
        self._block_bytes = tuple(layer.bytes_per_block for layer in spec.layers)
        self._total_blocks = total_blocks
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._references: dict[BlockId, int] = {}
        self._held: dict[str, dict[BlockId, int]] = {}
        self._layer_of: dict[BlockId, int] = {}
        self._used_bytes = 0
        self._marks: dict[BlockId, int] = {}  # evictable references of each block
        self._idle: Counter[str] = Counter()  # number of evictable caches of each holder
        self._busy: dict[str, None] = {}  # holders without an evictable cache
        self._evictable_blocks = 0
        self._evictable_bytes = 0

    # Usage

    @property
    def total_blocks(self) -> int | None:
        """The pool's budget in blocks; None if only bytes are limited."""
        return self._total_blocks

    @property
    def max_bytes(self) -> int | None:
        """The pool's budget in bytes; None if only blocks are limited."""
        return self._max_bytes

    @property
    def capacity_bytes(self) -> int:
        """The maximum size of all blocks together, in bytes."""
        by_count = None
        if self._total_blocks is not None:
            by_count = self._total_blocks * max(self._block_bytes)
        return min(limit for limit in (by_count, self._max_bytes) if limit is not None)

    @property
    def used_blocks(self) -> int:
        """The number of blocks with a holder."""
        return len(self._references)

    @property
    def used_bytes(self) -> int:
        """The number of bytes of the blocks with a holder."""
        return self._used_bytes

    @property
    def evictable_bytes(self) -> int:
        """The number of bytes of the evictable blocks."""
        return self._evictable_bytes

    def can_allocate(self, counts: Sequence[int], *, after_eviction: bool = False) -> bool:
        """Return whether the pool can allocate `counts[layer]` blocks of every layer now. If
        `after_eviction`, evictable blocks count as free."""
        with self._lock:
            n_blocks, n_bytes = len(self._references), self._used_bytes
            if after_eviction:
                n_blocks -= self._evictable_blocks
                n_bytes -= self._evictable_bytes
            return self._fits(counts, n_blocks, n_bytes)

    def fits_alone(self, counts: Sequence[int], *, beside: Iterable[str] = ()) -> bool:
        """Return whether `counts[layer]` blocks of every layer fit beside the blocks of
        `beside`."""
        with self._lock:
            held = {block for agent in beside for block in self._held.get(agent, ())}
            used_bytes = sum(self._block_bytes[self._layer_of[block]] for block in held)
            return self._fits(counts, len(held), used_bytes)

    def most_holders(self, counts: Sequence[int]) -> int:
        """Return how many agents with `counts[layer]` blocks of every layer fit into an empty
        pool."""
        n_bytes = sum(n * size for n, size in zip(counts, self._block_bytes, strict=True))
        by_count = None if self._total_blocks is None else self._total_blocks // sum(counts)
        by_bytes = None if self._max_bytes is None else self._max_bytes // n_bytes
        return min(most for most in (by_count, by_bytes) if most is not None)

    def busy_holders(self) -> tuple[str, ...]:
        """The agents that hold a block and have no evictable cache."""
        with self._lock:
            return tuple(self._busy)

    def view(self, agent_id: str) -> PoolView:
        with self._lock:
            per_layer = Counter(self._layer_of[block] for block in self._held.get(agent_id, ()))
        counts = tuple(per_layer[layer] for layer in range(self.spec.n_layers))
        n_bytes = sum(n * size for n, size in zip(counts, self._block_bytes, strict=True))
        return PoolView(agent_id, counts, n_bytes)

    def is_live(self, blocks: Iterable[KVBlock]) -> bool:
        """Return whether each of `blocks` has a holder."""
        with self._lock:
            return all(block.block_id in self._references for block in blocks)

    def is_exclusive(self, blocks: Iterable[KVBlock], agent_id: str) -> bool:
        """Return whether each of `blocks` has only one reference, by `agent_id`."""
        with self._lock:
            held = self._held.get(agent_id, {})
            return all(
                held.get(block.block_id) == 1 and self._references[block.block_id] == 1
                for block in blocks
            )

    # Allocating and freeing

    def allocate(self, n_blocks: int, layer_id: int, agent_id: str) -> list[KVBlock]:
        """Allocate `n_blocks` empty blocks of one layer to `agent_id`.

        Raises InvalidRequestError for wrong arguments. Raises PoolExhaustedError, with nothing
        changed, if the blocks exceed the budget.
        """
        if not 0 <= layer_id < self.spec.n_layers:
            raise InvalidRequestError(
                f"layer_id must be between 0 and {self.spec.n_layers - 1}, got {layer_id}"
            )
        counts = [0] * self.spec.n_layers
        counts[layer_id] = n_blocks
        return self.allocate_layers(counts, agent_id)[layer_id]

    def allocate_layers(self, counts: Sequence[int], agent_id: str) -> list[list[KVBlock]]:
        """Allocate `counts[layer]` blocks of each layer, or none. Raises `allocate`'s errors."""
        if len(counts) != self.spec.n_layers:
            raise InvalidRequestError(
                f"expected a count for each of {self.spec.n_layers} layers, got {len(counts)}"
            )
        if any(count < 0 for count in counts):
            raise InvalidRequestError(f"block counts must not be negative, got {list(counts)}")
        with self._lock:
            if not self._fits(counts, len(self._references), self._used_bytes):
                raise PoolExhaustedError(self._refusal(counts))
            return [
                self._allocate(count, layer_id, agent_id) for layer_id, count in enumerate(counts)
            ]

    def share(self, blocks: Iterable[KVBlock], agent_id: str) -> None:
        """Add `agent_id` as a holder of `blocks`. Raises InvalidRequestError, with nothing changed,
        if a block is free."""
        with self._lock:
            ids = [block.block_id for block in blocks]
            self._require_known(ids, self._references, "it has no holder")
            held = self._held_by(agent_id)
            self._change(ids, 1, 0)
            for block_id in ids:
                held[block_id] = held.get(block_id, 0) + 1
            self._settle(agent_id)

    def free(self, blocks: Iterable[KVBlock], agent_id: str) -> None:
        """Remove `agent_id` as a holder of `blocks`. Raises InvalidRequestError, with nothing
        changed, if the agent does not hold a block."""
        with self._lock:
            ids = Counter(block.block_id for block in blocks)
            held = self._held.get(agent_id, {})
            missing = [i for i, times in ids.items() if held.get(i, 0) < times]
            if missing:
                raise InvalidRequestError(
                    f"cannot free block {missing[0]}: agent {agent_id!r} does not hold it"
                )
            self._release(ids, held)
            self._settle(agent_id)

    # Evictable references

    def mark_evictable(self, blocks: Iterable[KVBlock], agent_id: str) -> None:
        """Mark one reference of `agent_id` to each of `blocks` as evictable."""
        with self._lock:
            self._change([block.block_id for block in blocks], 0, 1)
            self._idle[agent_id] += 1
            self._settle(agent_id)

    def unmark_evictable(self, blocks: Iterable[KVBlock], agent_id: str) -> None:
        """Undo `mark_evictable` for the same blocks."""
        with self._lock:
            self._change([block.block_id for block in blocks], 0, -1)
            self._idle[agent_id] -= 1
            if self._idle[agent_id] <= 0:
                del self._idle[agent_id]
            self._settle(agent_id)

    # Checking

    def check_integrity(self) -> None:
        """Raise IntegrityError unless references, holders, layers and bytes agree."""
        with self._lock:
            counted: Counter[BlockId] = Counter()
            for held in self._held.values():
                counted.update(held)
            used = sum(self._block_bytes[layer] for layer in self._layer_of.values())
            problems = []
            if dict(counted) != self._references:
                problems.append("holders and references differ")
            if self._layer_of.keys() != self._references.keys():
                problems.append("layers are known for other blocks than those in use")
            if used != self._used_bytes:
                problems.append(f"used_bytes is {self._used_bytes}, blocks sum to {used}")
            if self._total_blocks is not None and len(self._references) > self._total_blocks:
                problems.append("more blocks in use than the budget")
            if self._max_bytes is not None and self._used_bytes > self._max_bytes:
                problems.append("more bytes in use than the budget")
            problems += self._miscounts()
            if problems:
                raise IntegrityError("block pool: " + "; ".join(problems))

    # Inside

    def _fits(self, counts: Sequence[int], used_blocks: int, used_bytes: int) -> bool:
        if self._total_blocks is not None and used_blocks + sum(counts) > self._total_blocks:
            return False
        if self._max_bytes is None:
            return True
        extra = sum(n * size for n, size in zip(counts, self._block_bytes, strict=True))
        return used_bytes + extra <= self._max_bytes

    def _refusal(self, counts: Sequence[int]) -> str:
        n_bytes = sum(n * size for n, size in zip(counts, self._block_bytes, strict=True))
        budget = []
        if self._total_blocks is not None:
            budget.append(f"{self._total_blocks - len(self._references)} of {self._total_blocks}")
        if self._max_bytes is not None:
            budget.append(f"{self._max_bytes - self._used_bytes} of {self._max_bytes} bytes")
        return (
            f"Cannot allocate {sum(counts)} blocks ({n_bytes} bytes): "
            f"{' and '.join(budget)} are free"
        )

    def _miscounts(self) -> list[str]:
        evictable = [
            block for block, n in self._references.items() if self._marks.get(block, 0) >= n
        ]
        n_bytes = sum(self._block_bytes[self._layer_of[block]] for block in evictable)
        problems = []
        if (self._evictable_blocks, self._evictable_bytes) != (len(evictable), n_bytes):
            problems.append("the evictable blocks are counted wrong")
        if self._busy.keys() != self._held.keys() - self._idle.keys():
            problems.append("the busy holders are not those that hold blocks")
        return problems

    def _held_by(self, agent_id: str) -> dict[BlockId, int]:
        return self._held.setdefault(agent_id, {})

    def _settle(self, agent_id: str) -> None:
        if not self._held.get(agent_id):
            self._held.pop(agent_id, None)
        if agent_id in self._held and agent_id not in self._idle:
            self._busy[agent_id] = None
        else:
            self._busy.pop(agent_id, None)

    def _change(self, ids: Iterable[BlockId], references: int, marks: int) -> None:
        """Add `references` and `marks` to the counts of each block.

        A single loop without calls, because each request marks thousands of blocks twice.
        """
        in_use, marked = self._references, self._marks
        layer_of, block_bytes = self._layer_of, self._block_bytes
        n_blocks = n_bytes = 0
        for block_id in ids:
            users = in_use.get(block_id)
            if users is None:
                continue
            before = marked.get(block_id, 0)
            after = before + marks
            if after > 0:
                marked[block_id] = after
            elif before:
                del marked[block_id]
            was_evictable = before >= users
            if references:
                users = in_use[block_id] = users + references
            if (after >= users > 0) is not was_evictable:
                sign = -1 if was_evictable else 1
                n_blocks += sign
                n_bytes += sign * block_bytes[layer_of[block_id]]
        self._evictable_blocks += n_blocks
        self._evictable_bytes += n_bytes

    def _allocate(self, count: int, layer_id: int, agent_id: str) -> list[KVBlock]:
        if not count:
            return []
        ids = [BlockId(number) for number in itertools.islice(_numbers, count)]
        held = self._held_by(agent_id)
        for block_id in ids:
            self._references[block_id] = 1
            self._layer_of[block_id] = layer_id
            held[block_id] = 1
        self._used_bytes += count * self._block_bytes[layer_id]
        self._settle(agent_id)
        return [KVBlock(block_id, layer_id) for block_id in ids]

    def _release(self, ids: Mapping[BlockId, int], held: dict[BlockId, int]) -> None:
        for times in set(ids.values()):
            self._change([block for block, n in ids.items() if n == times], -times, 0)
        references, layer_of = self._references, self._layer_of
        for block_id, times in ids.items():
            left = held[block_id] - times
            if left:
                held[block_id] = left
            else:
                del held[block_id]
            if not references[block_id]:
                del references[block_id]
                self._marks.pop(block_id, None)
                self._used_bytes -= self._block_bytes[layer_of.pop(block_id)]

    @staticmethod
    def _require_known(ids: Iterable[BlockId], known: dict[BlockId, int], why_not: str) -> None:
        for block_id in ids:
            if block_id not in known:
                raise InvalidRequestError(f"cannot share block {block_id}: {why_not}")
