"""The parts that depend on the framework: the device, BLAS and the loader of models. Imports MLX
only inside functions."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from semantic.composition.engine_settings import Settings
from semantic.domain.errors import OperatorError

if TYPE_CHECKING:
    from semantic.adapters.mlx import BlasStatus
    from semantic.adapters.mlx.device import Device
    from semantic.adapters.mlx.model.provider import MLXModelProvider
    from semantic.adapters.mlx.ranks.shard import Ranks
    from semantic.domain.value_objects import ModelCacheSpec
    from semantic.ports.ranks import PlacementPort


_is_program = threading.Event()
_M_ARENA_MAX = -8  # of glibc's malloc.h
_ARENAS = 2


def be_program() -> None:
    """Set up this process as a program that computes only with MLX. Afterwards `import torch`
    fails, which saves seconds in transformers. MLX compiles its kernels in a private folder."""
    cast("dict[str, ModuleType | None]", sys.modules).setdefault("torch", None)
    _is_program.set()


def _share_arenas() -> None:
    """Let threads share glibc's arenas. Otherwise the memory of a server that loads models grows by
    megabytes a minute."""
    import ctypes  # not needed by commands that only print help

    if sys.platform == "linux":
        with suppress(AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def kernel_folder() -> Path:
    """Return the folder where MLX compiles kernels. Raises BackendError if other users can write to
    it."""
    from semantic.adapters.mlx import kernel_files

    return kernel_files.own() if _is_program.is_set() else kernel_files.require_own()


def free_memory() -> None:
    """Free the memory that models no longer use. Call this on MLX's thread."""
    from semantic.adapters.mlx.device import free_memory

    free_memory()


def read_device() -> Device:
    """Return the device that models run on. Raises OperatorError if MLX is not usable."""
    mlx_provider()
    from semantic.adapters.mlx import device

    return device.read_device()


def blas_status() -> BlasStatus:
    """Return the status of the BLAS library that computes on the CPU."""
    from semantic.adapters.mlx import BLAS_STATUS

    return BLAS_STATUS


def blas_kernel() -> str:
    """Return the name of the BLAS kernel for the CPU."""
    from semantic.adapters.mlx import blas_kernel

    return blas_kernel()


def read_bare_model(model: object) -> ModelCacheSpec | None:
    """Return the cache spec of a model object of mlx-lm, or None for any other object."""
    from semantic.adapters.mlx.kv_cache.model_spec import read_spec

    return read_spec(model)


def register_readers() -> None:
    """Let `ModelCacheSpec.from_model` read model objects of mlx-lm. Idempotent."""
    from semantic.domain.value_objects import ModelCacheSpec

    if read_bare_model not in ModelCacheSpec.readers:
        ModelCacheSpec.readers.append(read_bare_model)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block, because it may abort a process that imports MLX."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def mlx_provider(settings: Settings | None = None) -> MLXModelProvider:
    """Return the object that finds and loads models."""
    if _is_program.is_set():
        _share_arenas()
    try:
        if settings is not None:
            from semantic.adapters.mlx.cuda import first_kernels

            first_kernels.begin()  # first: the other imports take as long
        with _uninterrupted():
            from semantic.adapters.mlx.model.provider import MLXModelProvider
    except ImportError as error:
        from semantic.adapters.mlx import what_to_install

        raise OperatorError(f"cannot load MLX: {error}. {what_to_install()}") from error
    kernel_folder()
    if settings is None:
        return MLXModelProvider()
    meet = None if settings.ranks is None else partial(_meet, settings.ranks)
    return MLXModelProvider(
        any_chip=settings.any_chip,
        ranks=meet,
        exact_batch=settings.exact_batch,
        any_quality=settings.kv_bits_force,
    )


def _meet(placement: PlacementPort) -> Ranks:
    from semantic.adapters.mlx.ranks.shard import Ranks

    return Ranks(placement)
