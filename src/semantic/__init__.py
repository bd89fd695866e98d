"""Many LLM agents, one local model, and no token computed twice.

    >>> import semantic
    >>> model, tokenizer = semantic.load()
    >>> spec = semantic.ModelCacheSpec.from_model(model)
    >>> pool = semantic.BlockPool(spec, total_blocks=500)
    >>> engine = semantic.BlockPoolBatchEngine(model, tokenizer, pool, spec)

Public names are those in `__all__`.
"""

from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.bootstrap import load, register_readers
from semantic.domain.entities import AgentBlocks, KVBlock
from semantic.domain.errors import SemanticError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CompletedGeneration, ModelCacheSpec, SamplingParams

register_readers()

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
