"""Many LLM agents, one local model, and no token computed twice.

    >>> import semantic
    >>> model, tokenizer = semantic.load()
    >>> spec = semantic.ModelCacheSpec.from_model(model)
    >>> pool = semantic.BlockPool(spec, total_blocks=500)
    >>> engine = semantic.BlockPoolBatchEngine(model, tokenizer, pool, spec)

Public names are those in `__all__`. Each is imported when it is first asked for: a command that
only prints its help needs none.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semantic.application.engine.batch_engine import BlockPoolBatchEngine
    from semantic.bootstrap import load
    from semantic.domain.entities import AgentBlocks, KVBlock
    from semantic.domain.errors import SemanticError
    from semantic.domain.services import BlockPool
    from semantic.domain.value_objects import CompletedGeneration, ModelCacheSpec, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AgentBlocks",
    "BlockPool",
    "BlockPoolBatchEngine",
    "CompletedGeneration",
    "KVBlock",
    "ModelCacheSpec",
    "SamplingParams",
    "SemanticError",
    "load",
]

_MODULES = {
    "AgentBlocks": "domain.entities",
    "BlockPool": "domain.services",
    "BlockPoolBatchEngine": "application.engine.batch_engine",
    "CompletedGeneration": "domain.value_objects",
    "KVBlock": "domain.entities",
    "ModelCacheSpec": "domain.value_objects",
    "SamplingParams": "domain.value_objects",
    "SemanticError": "domain.errors",
    "load": "bootstrap",
}
"""Where each public name is."""


def __getattr__(name: str) -> object:
    """Import a public name, once. Raises AttributeError for another."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("semantic.bootstrap").register_readers()
    found: object = getattr(import_module(f"semantic.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names too, imported or not."""
    return sorted({*globals(), *__all__})
