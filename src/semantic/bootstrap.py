"""The one place where ports meet adapters.

Adapters are imported when they are needed: importing `semantic` loads no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from semantic.application.batch_engine import BlockPoolBatchEngine
from semantic.domain.errors import OperatorError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import ModelCacheSpec
from semantic.ports.outbound import BatchBackend, ModelProviderPort, Tokenizer

if TYPE_CHECKING:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.blas import BlasStatus
    from semantic.adapters.mlx.device import Device
    from semantic.adapters.mlx.layer_caches import LayerData
    from semantic.adapters.mlx.provider import MLXModelProvider
    from semantic.adapters.mlx.tokenizer import MLXTokenizer

KV = TypeVar("KV")

DEFAULT_MODEL = "semantic-tiny"
"""The model that ships with the package."""

_SHARE = 4
"""One part in this many of the memory goes to the pool: the weights, what a step computes and
everybody else on the machine need the rest."""
_LEAST_POOL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What to build. With neither limit the pool gets `default_pool_bytes`."""

    model: str = DEFAULT_MODEL
    pool_bytes: int | None = None
    pool_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class App(Generic[KV]):
    """An engine and what it was made of."""

    engine: BlockPoolBatchEngine[KV]
    model: BatchBackend[KV]
    tokenizer: Tokenizer
    pool: BlockPool[KV]
    spec: ModelCacheSpec


def build_engine(settings: Settings) -> App[LayerData]:
    """Load the model and put an engine around it.

    Raises as `load`, and InvalidRequestError for a pool without room.
    """
    return assemble(settings, _provider())


def assemble(settings: Settings, provider: ModelProviderPort[KV]) -> App[KV]:
    """An engine around the model that `provider` finds. Raises as `build_engine`."""
    model, tokenizer = provider.load_model(settings.model)
    spec = provider.extract_spec(model)
    pool: BlockPool[KV] = make_pool(settings, spec)
    return App(BlockPoolBatchEngine(model, tokenizer, pool, spec), model, tokenizer, pool, spec)


def make_pool(settings: Settings, spec: ModelCacheSpec) -> BlockPool[KV]:
    """The pool for a model that is already loaded. Raises InvalidRequestError if it is empty."""
    max_bytes = settings.pool_bytes
    if max_bytes is None and settings.pool_blocks is None:
        device = read_device()
        max_bytes = default_pool_bytes(device.memory_bytes, device.used_bytes)
    return BlockPool(spec, settings.pool_blocks, max_bytes=max_bytes)


def default_pool_bytes(memory: int, weights: int) -> int:
    """The pool's budget on a device of `memory` bytes that holds `weights` bytes already.

    A quarter of the memory, at most what the weights leave, at least 64 MiB.
    """
    return max(_LEAST_POOL_BYTES, min(memory // _SHARE, memory - weights))


def load(model_id: str = DEFAULT_MODEL) -> tuple[MLXBackend, MLXTokenizer]:
    """A model and its tokenizer, from a folder, a hub id or the embedded model.

    Raises ModelNotFoundError or UnsupportedModelError, and OperatorError when MLX is not usable.
    """
    return _provider().load_model(model_id)


def read_device() -> Device:
    """What models run on here. Raises OperatorError when MLX is not usable."""
    _provider()
    from semantic.adapters.mlx import device

    return device.read_device()


def blas_status() -> BlasStatus:
    """Which BLAS the CPU computes with; see `adapters.mlx.blas`."""
    from semantic.adapters.mlx import BLAS_STATUS

    return BLAS_STATUS


def read_bare_model(model: object) -> ModelCacheSpec | None:
    """The spec of a framework's own model object; None when no framework knows it."""
    from semantic.adapters.mlx.spec_reader import read_spec

    return read_spec(model)


def register_readers() -> None:
    """Let `ModelCacheSpec.from_model` read bare models. Doing it again changes nothing."""
    if read_bare_model not in ModelCacheSpec.readers:
        ModelCacheSpec.readers.append(read_bare_model)


def _provider() -> MLXModelProvider:
    try:
        from semantic.adapters.mlx.provider import MLXModelProvider
    except ImportError as error:
        raise OperatorError(
            f"MLX cannot be loaded: {error}. On Linux install semantic[cpu] or semantic[cuda]"
        ) from error
    return MLXModelProvider()
