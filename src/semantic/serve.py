"""A served model, put together: its engine on a thread of its own, and what wires talk to.

The other place where ports meet adapters; see `bootstrap` for the engine alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from semantic.application.agents.agent_names import AgentNames
from semantic.application.agents.directory import AgentDirectory
from semantic.application.agents.finder import AgentFinder
from semantic.application.agents.served_agents import ServedAgents
from semantic.application.chat.preparation import Preparation
from semantic.application.chat.replay import Replay
from semantic.application.engine.admission import QueueLimits
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.serving import Serving
from semantic.bootstrap import App, Settings, StoreOff, build_engine, open_turns, rebuilt
from semantic.domain.block_hash import namespace_of, tenant_tag
from semantic.domain.chat import Chat
from semantic.domain.errors import InvalidRequestError, SemanticError
from semantic.domain.grammar import Grammar
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import BLOCK_TOKENS, SamplingParams
from semantic.ports.serving import ServedModel

if TYPE_CHECKING:
    pass

logger = logging.getLogger("semantic.server")

DEFAULT_NAME = "default"
"""Every served model answers to it."""
_WORKERS = 2
"""Prompts are rendered by so many threads; the model needs the other cores."""
_UNKNOWN_CONTEXT = 1 << 20
"""Tokens; of a model that does not say for how many it was made, the pool is the only limit."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What to serve, and how.

    `names` are what the model is called, by default what `engine.model` says. Without
    `max_context` its context is what it was made for, as far as the pool can hold it. Requests
    that do not say how to sample get what the model's makers recommend, but for what is given
    here. `max_tokens` is what an answer may have when its request does not say; without it, all
    that the context has room for. What conversations have in common with those in `public` is
    computed once for all tenants.
    """

    engine: Settings = field(default_factory=Settings)
    names: tuple[str, ...] = ()
    max_context: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    limits: QueueLimits = field(default_factory=QueueLimits)
    public: tuple[Chat, ...] = ()


async def load_serving(settings: ServeSettings, store_off: StoreOff | None = None) -> Serving:
    """Load the model on its own thread and return when it can be asked.

    Raises as `bootstrap.build_engine` and `Serving.publish`, and InvalidRequestError for a
    context that does not fit.
    """
    apps: list[App] = []
    public: list[tuple[int, ...]] = []

    def build() -> BlockPoolBatchEngine:
        apps.append(build_engine(settings.engine, store_off))
        return apps[-1].engine

    def rebuild() -> BlockPoolBatchEngine:
        apps.append(rebuilt(apps.pop()))
        for tokens in public:
            apps[-1].engine.make_public(tokens)
        return apps[-1].engine

    thread: EngineThread = EngineThread(build, rebuild, settings.limits)
    thread.start()
    try:
        await asyncio.wrap_future(thread.ready)
        serving = await asyncio.to_thread(_around, thread, apps[-1], settings)
        public += [await serving.publish(chat) for chat in settings.public]
    except (asyncio.CancelledError, SemanticError):
        # A model that is being loaded cannot be stopped; it ends when it is there.
        threading.Thread(target=thread.stop, kwargs={"drain": False}, daemon=True).start()
        raise
    return serving


def context_tokens(pool: BlockPool, made_for: int | None, wanted: int | None) -> int:
    """Tokens that one request may have in all: the least of three limits.

    Raises InvalidRequestError when more are wanted than there can be.
    """
    held = _held(pool)
    possible = min(held, made_for or _UNKNOWN_CONTEXT)
    if wanted is not None and wanted > possible:
        reason = "the pool holds" if held == possible else "the model was made for"
        raise InvalidRequestError(f"a context of {wanted} tokens: {reason} {possible}")
    return wanted or possible


def _held(pool: BlockPool) -> int:
    """The most tokens that one sequence can have with the whole pool to itself."""
    low, high = 0, _UNKNOWN_CONTEXT // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if pool.fits_alone(pool.spec.blocks_for(middle * BLOCK_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_TOKENS


def _around(thread: EngineThread, app: App, settings: ServeSettings) -> Serving:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.model.provider import find_folder, read_context, read_sampling
    from semantic.adapters.mlx.text.chat_format import MLXChatFormat
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer

    if not (isinstance(app.model, MLXBackend) and isinstance(app.tokenizer, MLXTokenizer)):
        raise InvalidRequestError(f"expected a loaded model, got {type(app.model).__name__}")
    limit = context_tokens(app.pool, read_context(app.model.model), settings.max_context)
    sampling = _sampling(settings, read_sampling(find_folder(settings.engine.model)))
    names = dict.fromkeys((*(settings.names or (settings.engine.model,)), DEFAULT_NAME))
    served = ServedModel(tuple(names), limit, app.model.vocab_size, int(time.time()), sampling)
    chat_format = MLXChatFormat(app.tokenizer)
    namespace = namespace_of(app.model.model_id, app.model.layout().name)
    logger.info(chat_format.history)
    turns = open_turns(app.settings, logger.warning)
    replay = Replay(chat_format, turns, namespace, app.tokenizer.eos_token_ids)
    preparation = Preparation(
        app.tokenizer,
        chat_format,
        replay,
        app.model.check_grammar,
        limit,
        settings.max_tokens,
        longest_token=app.tokenizer.longest_token,
    )
    finder = AgentFinder(partial(tenant_tag, app.store.secret), lambda *_: True)
    finder.restore(sorted(app.store.manifests(), key=lambda one: -one.saved_at))
    workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="prepare")
    # The first grammar of a tokenizer takes seconds: neither the start nor a client waits for it.
    workers.submit(app.model.check_grammar, Grammar("json_schema", "{}"))
    directory: AgentDirectory = AgentDirectory(app.store, namespace, served.id)
    agents = ServedAgents(thread, directory, finder, workers)
    return Serving(
        thread,
        served,
        app.tokenizer,
        chat_format,
        preparation,
        replay,
        AgentNames(finder),
        agents,
        workers,
    )


def _sampling(settings: ServeSettings, made_for: SamplingParams) -> SamplingParams:
    """How requests are sampled that do not say: what is set here, else as the model was made."""
    temperature = made_for.temperature if settings.temperature is None else settings.temperature
    top_p = made_for.top_p if settings.top_p is None else settings.top_p
    top_k = made_for.top_k if settings.top_k is None else settings.top_k
    min_p = made_for.min_p if settings.min_p is None else settings.min_p
    return SamplingParams(temperature, top_p, top_k, min_p)
