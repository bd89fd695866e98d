"""The framework's parts by name: the device, BLAS, and the loader of models. Imports MLX inside
functions: importing this loads no framework."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from semantic.composition.engine_settings import Settings
from semantic.domain.errors import (
    OperatorError,
)

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
    """Set up this process, in which no code but ours runs: it computes with MLX alone.
    `import torch` fails: transformers would import it, for seconds. MLX compiles in a folder of the
    process's own, where a library refuses one that others may write to."""
    cast("dict[str, ModuleType | None]", sys.modules).setdefault("torch", None)
    _is_program.set()


def _share_arenas() -> None:
    """Let threads share glibc's arenas: with one each, free memory stays scattered, and a server
    that loads models in turn grows by megabytes a minute."""
    import ctypes  # no command that prints its help needs it

    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def kernel_folder() -> Path:
    """The folder where MLX compiles and no other user can write. Raises BackendError."""
    from semantic.adapters.mlx import kernel_files

    return kernel_files.own() if _is_program.is_set() else kernel_files.require_own()


def free_memory() -> None:
    """Free memory of models that nothing refers to; on MLX's thread."""
    from semantic.adapters.mlx.device import free_memory

    free_memory()


def read_device() -> Device:
    """The device that models run on. Raises OperatorError when MLX is not usable."""
    mlx_provider()
    from semantic.adapters.mlx import device

    return device.read_device()


def blas_status() -> BlasStatus:
    """The BLAS of CPU computations; see `adapters.mlx.load_openblas`."""
    from semantic.adapters.mlx import BLAS_STATUS

    return BLAS_STATUS


def blas_kernel() -> str:
    """The kernel of CPU computations; see `adapters.mlx.blas_kernel`."""
    from semantic.adapters.mlx import blas_kernel

    return blas_kernel()


def read_bare_model(model: object) -> ModelCacheSpec | None:
    """The spec of a framework's own model object; None for any other object."""
    from semantic.adapters.mlx.kv_cache.model_spec import read_spec

    return read_spec(model)


def register_readers() -> None:
    """Let `ModelCacheSpec.from_model` read bare models. Idempotent."""
    from semantic.domain.value_objects import ModelCacheSpec

    if read_bare_model not in ModelCacheSpec.readers:
        ModelCacheSpec.readers.append(read_bare_model)


def mlx_provider(settings: Settings | None = None) -> MLXModelProvider:
    """Return the loader of models; `settings` are those of a model with weights to load."""
    if _is_program.is_set():
        _share_arenas()
    try:
        if settings is not None:
            from semantic.adapters.mlx.cuda import first_kernels

            first_kernels.begin()  # first: the other imports take as long
        from semantic.adapters.mlx.model.provider import MLXModelProvider
    except ImportError as error:
        from semantic.adapters.mlx import what_to_install

        raise OperatorError(f"cannot load MLX: {error}. {what_to_install()}") from error
    kernel_folder()
    if settings is None:
        return MLXModelProvider()
    meet = None if settings.ranks is None else partial(_meet, settings.ranks)
    return MLXModelProvider(any_chip=settings.any_chip, ranks=meet)


def _meet(placement: PlacementPort) -> Ranks:
    from semantic.adapters.mlx.ranks.shard import Ranks

    return Ranks(placement)
