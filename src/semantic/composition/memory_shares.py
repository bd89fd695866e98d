"""Computes how much memory the process and each of its parts may use."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from semantic.composition.engine_settings import Settings
from semantic.composition.framework import read_device
from semantic.composition.named_models import find_model
from semantic.domain.errors import CapacityError, InvalidRequestError

if TYPE_CHECKING:
    from semantic.adapters.mlx.device import Device
    from semantic.application.engine.step_loop import StepLoop
    from semantic.ports.generation import BatchBackend
    from semantic.ports.store import CacheStorePort

_MIB = 1 << 20
_GIB = 1 << 30

# The process' part of the memory that the system allows: the rest is for files and other programs.
_PROCESS_SHARE = 9, 10

# The unplanned part of the process' memory: for a step, and for the guard's reserve.
_UNPLANNED_FRACTION = 8

# Memory for the interpreter, libraries, turns, responses and other small parts.
_BASE_BYTES = 384 * _MIB

# Block pool: the weights, the activations of a step and other parts need the rest of the memory.
_POOL_FRACTION = 4

_MIN_POOL_BYTES = 64 * _MIB

# Memory tier of the store: avoids reading from disk after an eviction from the pool.
_MEMORY_TIER_FRACTION = 16

_MIN_MEMORY_TIER_BYTES = 64 * _MIB


def default_pool_of(settings: Settings) -> int:
    """Return the pool's limit in bytes, given the loaded weights. Call this on MLX's thread."""
    return default_pool_bytes(memory_of(settings), read_device().used_bytes)


def default_pool_bytes(memory: int, weights: int) -> int:
    """Return the pool's limit in bytes: a quarter of `memory`, or less if `weights` need more. The
    limit is at least 64 MiB."""
    left = planned_bytes(memory) - default_memory_tier_bytes(memory) - weights
    return max(_MIN_POOL_BYTES, min(memory // _POOL_FRACTION, left))


def pool_share(settings: Settings, n_models: int) -> Settings:
    """Return `settings` with one of `n_models` equal parts of the pool's limit. Call this on MLX's
    thread. Raises the same errors as `load`."""
    n_bytes, n_blocks = settings.pool_bytes, settings.pool_blocks
    if n_blocks is not None:
        settings = replace(settings, pool_blocks=n_blocks // n_models)
    elif n_bytes is None:
        n_bytes = default_pool_bytes(memory_of(settings), _weights_of(settings.model))
    if n_bytes is not None:
        settings = replace(settings, pool_bytes=n_bytes // n_models)
    return settings


def planned_bytes(memory: int) -> int:
    """Return the bytes for weights, pools and the memory tier in a process of `memory` bytes."""
    return memory - memory // _UNPLANNED_FRACTION - _BASE_BYTES


def default_memory_tier_bytes(memory: int) -> int:
    """Return the limit of the store's memory tier in bytes. It is a sixteenth of the memory, and at
    least 64 MiB."""
    return max(_MIN_MEMORY_TIER_BYTES, memory // _MEMORY_TIER_FRACTION)


def memory_of(settings: Settings) -> int:
    """Return the number of bytes that the process may use."""
    device = read_device()
    if settings.process_bytes is None:
        return default_process_bytes(device) // (settings.ranks.here if settings.ranks else 1)
    return min(device.memory_bytes, settings.process_bytes)


def default_process_bytes(device: Device, weights: int = 0, sharing: int = 1) -> int:
    """Return the default memory limit of a process in bytes. It is nine tenths of the free memory,
    divided among `sharing` processes. `weights` may raise it."""
    part, whole = _PROCESS_SHARE
    share = device.free_bytes * part // whole // sharing
    return min(device.memory_bytes, max(share, least_process_bytes(weights)))


def least_process_bytes(weights: int) -> int:
    """Return the minimum memory in bytes for a process with `weights` bytes of weights."""
    least = _BASE_BYTES + weights + _MIN_POOL_BYTES
    unplanned, tier = _UNPLANNED_FRACTION, _MEMORY_TIER_FRACTION
    with_part = least * unplanned * tier // (unplanned * tier - unplanned - tier)
    with_least_tier = (least + _MIN_MEMORY_TIER_BYTES) * unplanned // (unplanned - 1)
    return max(with_part, with_least_tier) + unplanned * tier  # divisions round down


def promised(
    settings: Settings, others: Sequence[str] = (), embedding: str | None = None, sharing: int = 1
) -> Settings:
    """Return `settings` with a memory limit for one of `sharing` processes. Call this on MLX's
    thread. Raises CapacityError if a model does not fit by itself, and the same errors as
    `load`."""
    device, (beside, *answering) = (
        read_device(),
        map(_weights_of, (embedding, settings.model, *others)),
    )
    weights = beside + max(answering)
    promise, grid = settings.process_bytes, settings.ranks
    if grid is not None:
        weights = weights // grid.size + 1
    if promise is None and grid is not None:
        promise = default_process_bytes(device, weights * grid.here) // grid.here
    if promise is None:
        promise = default_process_bytes(device, weights, sharing)
    most = promise - promise // _UNPLANNED_FRACTION
    if weights > most:
        raise CapacityError(
            f"the weights of {settings.model} must fit in {most / _GIB:.3g} GiB, got "
            f"{weights / _GIB:.3g} GiB (the process may use {promise / _GIB:.3g} of "
            f"{device.memory_bytes / _GIB:.3g} GiB of memory)"
        )
    return replace(settings, process_bytes=promise)


def _weights_of(model: str | None) -> int:
    if model is None:
        return 0
    from semantic.adapters.mlx.model.description import weights_bytes

    return weights_bytes(find_model(model))


def guard_memory(loop: StepLoop, settings: Settings, report: Callable[[str], None]) -> None:
    """Keep the process below `process_bytes` by freeing caches. Does nothing if it is None."""
    from semantic.application.engine.memory_guard import Memory, MemoryGuard

    if settings.process_bytes is None:
        return
    from semantic.adapters.mlx import device as of

    loop.guard = MemoryGuard(
        settings.process_bytes,
        Memory(of.memory_in_use, of.give_memory_back, of.memory_to_spare, of.memory_kept),
        clock=time.monotonic,
        report=report,
        most=read_device().memory_bytes,
    )


def memory_left(settings: Settings) -> int:
    """Return the bytes that the process may still use. Less than 0 means that it uses too many."""
    from semantic.adapters.mlx.device import memory_in_use, memory_to_spare

    left = sys.maxsize if settings.process_bytes is None else settings.process_bytes
    spare = memory_to_spare()
    left -= memory_in_use()
    return left if spare is None else min(left, spare)


def heed_ranks(loop: StepLoop, model: BatchBackend) -> None:
    """If `model` has ranks, let the guard consider the free memory of every rank."""
    from semantic.adapters.mlx.device import memory_in_use, memory_kept
    from semantic.adapters.mlx.ranks.leading import LeadingBackend
    from semantic.application.engine.memory_guard import Memory

    if loop.guard is not None and isinstance(model, LeadingBackend):
        loop.guard.measure_by(
            Memory(memory_in_use, model.give_memory_back, model.memory_to_spare, memory_kept)
        )


def guarded_loop(settings: Settings, report: Callable[[str], None]) -> StepLoop:
    from semantic.application.engine.step_loop import StepLoop

    loop = StepLoop()
    guard_memory(loop, settings, report)
    return loop


def give_up_under_pressure(loop: StepLoop, store: CacheStorePort) -> None:
    """Let the memory guard free the memory tier of `store`, then the caches of idle agents. Raises
    InvalidRequestError if the process already uses most of its limit."""
    from semantic.adapters.mlx.device import on_cuda
    from semantic.adapters.stores.memory import MemoryStore
    from semantic.adapters.stores.tiered import TieredStore

    guard = loop.guard
    if guard is None:
        return
    if (used := guard.lacks_room()) is not None:
        raise InvalidRequestError(
            f"--memory-gb must be well above {used / _GIB:.3g} GiB, got "
            f"{guard.max_bytes / _GIB:.3g}: the idle process takes {used / _GIB:.3g} GiB"
        )
    tier = store
    while isinstance(tier, TieredStore):
        tier = tier.warm
    # With CUDA the limit counts device memory only, and the tier is host memory.
    if isinstance(tier, MemoryStore) and not on_cuda():
        guard.add("the memory tier", tier.release)
    guard.add("idle caches", loop.evict_idle)
