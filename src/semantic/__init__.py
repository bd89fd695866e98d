"""Many LLM agents, one local model, and no token computed twice.

    >>> import semantic
    >>> with semantic.Engine() as engine:
    ...     print(engine.chat("ada", "My name is Ada.").text)
    Nice to meet you, Ada.

`__all__` lists the public names.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` takes long to import, and until then Ctrl-C prints a traceback
if TYPE_CHECKING:
    from semantic.application.engine.batch_engine import BlockPoolBatchEngine
    from semantic.bootstrap import load
    from semantic.domain.chat import Message, Tool, ToolChoice
    from semantic.domain.entities import AgentBlocks, KVBlock
    from semantic.domain.errors import SemanticError
    from semantic.domain.services import BlockPool
    from semantic.domain.value_objects import CompletedGeneration, ModelCacheSpec, SamplingParams
    from semantic.library.answers import Answer, AsyncAnswerStream
    from semantic.library.async_agent import AsyncAgent
    from semantic.library.async_engine import AsyncEngine
    from semantic.library.chat_options import ChatOptions, Request
    from semantic.library.engine import Agent, AnswerStream, Engine

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentBlocks",
    "Answer",
    "AnswerStream",
    "AsyncAgent",
    "AsyncAnswerStream",
    "AsyncEngine",
    "BlockPool",
    "BlockPoolBatchEngine",
    "ChatOptions",
    "CompletedGeneration",
    "Engine",
    "KVBlock",
    "Message",
    "ModelCacheSpec",
    "Request",
    "SamplingParams",
    "SemanticError",
    "Tool",
    "ToolChoice",
    "load",
]

_MODULES = {
    "Agent": "library.engine",
    "AgentBlocks": "domain.entities",
    "Answer": "library.answers",
    "AnswerStream": "library.engine",
    "AsyncAgent": "library.async_agent",
    "AsyncAnswerStream": "library.answers",
    "AsyncEngine": "library.async_engine",
    "BlockPool": "domain.services",
    "BlockPoolBatchEngine": "application.engine.batch_engine",
    "ChatOptions": "library.chat_options",
    "CompletedGeneration": "domain.value_objects",
    "Engine": "library.engine",
    "KVBlock": "domain.entities",
    "Message": "domain.chat",
    "ModelCacheSpec": "domain.value_objects",
    "Request": "library.chat_options",
    "SamplingParams": "domain.value_objects",
    "SemanticError": "domain.errors",
    "Tool": "domain.chat",
    "ToolChoice": "domain.chat",
    "load": "bootstrap",
}


def __getattr__(name: str) -> object:
    """Import a public name on its first use. Raises AttributeError for any other name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import_module("semantic.composition.framework").register_readers()
    found: object = getattr(import_module(f"semantic.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
