"""Composition root of a server: builds the engine on its own thread, and the objects that the HTTP
server calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from semantic.application.agents.directory import AgentDirectory
from semantic.application.agents.finder import AgentFinder, AgentNames, SavedAgents
from semantic.application.agents.footprint import newest_first
from semantic.application.agents.served_agents import AgentTransfers, ServedAgents
from semantic.application.cache.prefix_lookup import Discovery
from semantic.application.chat.families import Parsers
from semantic.application.chat.grammar_checks import GrammarChecks, Verdicts
from semantic.application.chat.preparation import ImageInput, Preparation
from semantic.application.chat.replay import Replay
from semantic.application.embeddings import Embeddings
from semantic.application.engine.admission import QueueLimits
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.step_loop import StepLoop
from semantic.application.fair_threads import FairThreads
from semantic.application.serving import Serving
from semantic.bootstrap import (
    App,
    OnStoreUnavailable,
    Shared,
    assembling,
    build_in_slices,
    rebuild_app,
)
from semantic.composition.engine_settings import NamedAdapter, Settings
from semantic.composition.framework import mlx_provider
from semantic.composition.memory_shares import give_up_under_pressure, guarded_loop, heed_ranks
from semantic.composition.named_models import model_name, model_path, parse_adapter
from semantic.composition.process_stores import (
    durable_tier,
    local_tiers,
    open_events,
    open_turns,
    remote_tier,
    unfinished_folder,
)
from semantic.domain.block_hash import namespace_of, tenant_id, tenant_tag
from semantic.domain.chat import Chat
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import BLOCK_TOKENS, SamplingParams
from semantic.ports.agents import TenantId
from semantic.ports.embedding import Embedder, EmbeddingModel
from semantic.ports.generation import Slices
from semantic.ports.serving import ModelDetails, ServedModel
from semantic.ports.store import TurnsPort

if TYPE_CHECKING:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.text.chat_format import MLXChatFormat

logger = logging.getLogger("semantic.server")

_ONE_BY_ONE = (
    "this model's answers in a batch differ from those alone: each step computes requests one "
    "after another"
)
_ANY_CHIP = (
    "share_across_chips: the engine uses blocks that other kinds of chips computed, which differ "
    "in their last bits: an answer may differ from one computed here alone"
)
_REUSABLE = "this model's keys depend on how a prompt is divided: it reuses only %d tokens"

DEFAULT_NAME = "default"
"""An extra name of the first model, and of an embedding model."""
_MLX_LM_NAME = "default_model"
"""The name by which clients of mlx_lm.server mean its model."""
_WORKERS = 3
"""The number of threads that render prompts. One of them renders only short prompts."""
_PROBES = 2
"""The number of processes that check grammars."""
_MAX_CONTEXT = 1 << 20
"""The maximum context, in tokens, of a model that states none."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """The settings of a model to serve, and the defaults of its requests."""

    engine: Settings = field(default_factory=Settings)
    names: tuple[str, ...] = ()
    aliases: frozenset[str] = frozenset()
    any_name: bool = False
    """True if requests may use any name for the model."""
    parent: str | None = None
    is_first: bool = True
    """True if this is the first of several models."""
    max_context: int | None = None
    """The limit on a prompt plus its answer, in tokens."""
    temperature: float | None = None
    """None here and below means that the model's configuration decides."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    """The limit on an answer in tokens. None means the size of the context."""
    image_input: ImageInput = "reject-once"
    parsers: Parsers = field(default_factory=Parsers)
    limits: QueueLimits = field(default_factory=QueueLimits)
    public: tuple[Chat, ...] = ()
    """Conversations whose caches all tenants share."""
    tenants: tuple[str, ...] = ()
    """The tenants' names, in the order of their API keys."""
    events: tuple[str, str] | None = None
    """The address and the topic for publishing changes of the store."""


async def load_serving(
    settings: ServeSettings,
    on_store_unavailable: OnStoreUnavailable | None = None,
    shared: Shared | None = None,
    loop: StepLoop | None = None,
) -> Serving:
    """Load the model on the engine's thread. Returns once it serves requests. Raises the same
    errors as `bootstrap.build_engine`, and InvalidRequestError if `max_context` is too large."""
    apps: list[App] = []
    public: list[tuple[int, ...]] = []
    publisher = None if settings.events is None else open_events(*settings.events)

    def build() -> Slices[BlockPoolBatchEngine]:
        if shared is None:
            provider = mlx_provider(settings.engine)
            app = yield from assembling(settings.engine, provider, on_store_unavailable, publisher)
        else:
            app = yield from build_in_slices(settings.engine, shared)
        apps.append(app)
        return app.engine

    def rebuild() -> BlockPoolBatchEngine:
        apps.append(rebuild_app(apps.pop()))
        for tokens in public:
            apps[-1].engine.make_public(tokens)
        return apps[-1].engine

    if shared is None:
        loop = loop or guarded_loop(settings.engine, logger.info)
    thread = EngineThread(
        build,
        rebuild,
        settings.limits,
        loop=loop if shared is None else shared.loop,
        keep_store=shared is not None,
        on_failure=_report_failure,
    )
    async with AsyncExitStack() as undo:
        if publisher is not None:
            undo.callback(publisher.close)
        undo.push_async_callback(asyncio.to_thread, thread.stop, drain=False)
        thread.start()
        await asyncio.wrap_future(thread.ready)
        if loop is not None:
            give_up_under_pressure(loop, apps[-1].store)
            heed_ranks(loop, apps[-1].model)
        turns = None if shared is None else shared.turns
        serving = await asyncio.to_thread(_build_serving, thread, apps[-1], settings, turns)
        undo.push_async_callback(serving.close)
        remote = remote_tier(apps[-1].store)
        if remote is not None:
            serving.discovery = Discovery(apps[-1].model, apps[-1].store, remote)
        if publisher is not None:
            publisher.begin(_namespace(apps[-1]), local_tiers(apps[-1].store))
            serving.at_end = publisher.close
        public += [await serving.publish(chat) for chat in settings.public]
        undo.pop_all()
    return serving


def _report_failure(error: Exception) -> None:
    logger.error("unexpected %s: %s", type(error).__name__, error)


async def load_embeddings(model: str, names: tuple[str, ...], loop: StepLoop) -> Embeddings:
    """Load an embedding model that computes on the thread of `loop`. Raises the same errors as
    `load_embedder`."""

    def load() -> tuple[Embedder, ModelDetails]:
        from semantic.adapters.mlx.model.load_embedder import load_embedder
        from semantic.adapters.mlx.model.provider import find_folder

        return load_embedder(find_folder(model))

    embedder, details = await asyncio.wrap_future(loop.call(load))
    aliases = frozenset({model_name(model), model, DEFAULT_NAME} - {*names})
    known = EmbeddingModel(
        names, embedder.dimensions, embedder.max_tokens, int(time.time()), aliases, details
    )
    workers, turns = FairThreads(2, "encode"), FairThreads(2, "embed")
    return Embeddings(known, embedder, loop.call, workers, turns)


def context_limit(pool: BlockPool, of_model: int | None, requested: int | None) -> int:
    """Return the maximum number of tokens of one request. Raises InvalidRequestError if `requested`
    exceeds the limit of the pool or of the model."""
    of_pool = _pool_tokens(pool)
    limit = min(of_pool, of_model or _MAX_CONTEXT)
    if requested is not None and requested > limit:
        reason = "the pool holds" if of_pool == limit else "the model supports"
        raise InvalidRequestError(f"a context of {requested} tokens: {reason} only {limit}")
    return requested or limit


def _pool_tokens(pool: BlockPool) -> int:
    low, high = 0, _MAX_CONTEXT // BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if pool.fits_alone(pool.spec.blocks_for(middle * BLOCK_TOKENS)):
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_TOKENS


def _build_serving(
    thread: EngineThread, app: App, settings: ServeSettings, turns: TurnsPort | None = None
) -> Serving:
    from semantic.adapters.mlx.backend import MLXBackend
    from semantic.adapters.mlx.kv_cache.model_spec import read_context
    from semantic.adapters.mlx.model.provider import find_folder
    from semantic.adapters.mlx.text.chat_format import MLXChatFormat
    from semantic.adapters.mlx.text.tokenizer import MLXTokenizer

    if not (isinstance(app.model, MLXBackend) and isinstance(app.tokenizer, MLXTokenizer)):
        raise InvalidRequestError(f"expected a loaded model, got {type(app.model).__name__}")
    model, tokenizer = app.model, app.tokenizer
    limit = context_limit(app.pool, read_context(model.model), settings.max_context)
    folder = find_folder(settings.engine.model)
    sampling = sampling_of(settings, folder)
    checks = _grammar_checks(model)
    chat_format = MLXChatFormat(tokenizer, model.grammars, settings.parsers)
    served = _served_model(settings, model, chat_format, folder, limit, sampling)
    chat_format.tell(logger)
    _warn_of_differences(app, together=model.together)
    if turns is None:
        log_tenants(app.store.secret, settings.tenants)
    kept = turns or open_turns(app.settings, logger.warning)
    replay = Replay(
        chat_format, kept, _namespace(app), tokenizer.eos_token_ids, is_owner=turns is None
    )
    preparation = Preparation(
        tokenizer,
        chat_format,
        replay,
        model.check_grammar,
        limit,
        settings.max_tokens,
        longest_token=tokenizer.longest_token,
        checks=checks,
        image_input=settings.image_input,
    )
    finder = AgentFinder(partial(tenant_tag, app.store.secret))
    saved = SavedAgents(finder, newest_first(app.store.agents))
    workers = FairThreads(_WORKERS, "prepare")
    # The first grammar of a tokenizer takes seconds: compile it now, without delaying the start.
    first = Grammar("json_schema", "{}")
    workers.submit("", lambda: model.check_grammar(first), is_short=False)
    directory: AgentDirectory = AgentDirectory(
        app.store, durable_tier(app.store), _namespace(app), served.id
    )
    transfers = _transfers(thread, app, directory, settings.tenants)
    agents = ServedAgents(thread, directory, finder, workers, transfers)
    names = AgentNames(finder, saved)
    serving = Serving(
        thread, served, tokenizer, chat_format, preparation, replay, names, agents, workers
    )
    saved.start()
    return serving


def _grammar_checks(model: MLXBackend) -> GrammarChecks:
    from semantic.adapters.mlx.sampling.grammar_process import GrammarProcess

    grammars, verdicts = model.grammars, Verdicts()
    grammars.guard(verdicts)
    probes = [GrammarProcess(lambda: grammars.vocabulary) for _ in range(_PROBES)]
    return GrammarChecks(probes, verdicts, grammars.compile)


def _served_model(
    settings: ServeSettings,
    model: MLXBackend,
    chat_format: MLXChatFormat,
    folder: Path,
    limit: int,
    sampling: SamplingParams,
) -> ServedModel:
    from semantic.adapters.mlx.model.description import read_details

    names, aliases = served_names(settings)
    details = replace(
        read_details(model.model, model.model_id, folder),
        template=chat_format.source,
        thinks=chat_format.thought_marks is not None,
        tools=chat_format.tools,
        call_parser=chat_format.call_parser,
        lane=model.lane,
    )
    made = int(time.time())
    return ServedModel(
        names, limit, model.vocab_size, made, sampling, aliases, details, settings.parent,
        settings.any_name,
    )  # fmt: skip


def _warn_of_differences(app: App, *, together: bool) -> None:
    """Log each reason why an answer may depend on other requests."""
    if app.settings.any_chip:
        logger.warning(_ANY_CHIP)
    if not together:
        logger.warning(_ONE_BY_ONE)
    if app.spec.reusable_tokens is not None:
        logger.warning(_REUSABLE, app.spec.reusable_tokens)


def _namespace(app: App) -> bytes:
    return namespace_of(app.model.model_id, app.model.layout().name)


def _transfers(
    thread: EngineThread, app: App, directory: AgentDirectory, tenants: Sequence[str]
) -> AgentTransfers:
    from semantic.adapters.exchange.archive import AgentArchives

    store = app.store
    archives = AgentArchives(
        store,
        durable_tier(store),
        _namespace(app),
        app.model.layout(),
        unfinished_folder(app.settings),
        model=app.settings.label,
        model_name=model_name(app.settings.label),
    )
    ids = {TenantId(tenant_id(store.secret, tenant_tag(store.secret, one))): one for one in tenants}
    return AgentTransfers(thread, directory, archives, ids)


def served_names(settings: ServeSettings) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of the model in lists, and then the other names that requests may use."""
    given, adapter = settings.engine.model, settings.engine.adapter
    own = model_name(given)
    if adapter is not None:
        return settings.names or (adapter.named(own),), settings.aliases - {*settings.names}
    names = dict.fromkeys(settings.names or (own,))
    aliases = {own, given}
    if settings.is_first:
        names[DEFAULT_NAME] = None
        aliases.add(_MLX_LM_NAME)
    if own != given:
        aliases.add(str(model_path(given)))
    return tuple(names), frozenset(aliases - names.keys())


def with_adapters(
    models: Sequence[ServeSettings], given: Sequence[str]
) -> list[list[ServeSettings]]:
    """Return one list per model in `models`. It contains the model, and the model with each of its
    adapters. Raises InvalidRequestError."""
    adapters = [parse_adapter(one) for one in given]
    alone = Counter(adapter.name for _, adapter in adapters)
    groups = [[one] for one in models]
    for text, (base, adapter) in zip(given, adapters, strict=True):
        number = _base_of(text, base, models)
        is_alone = alone[adapter.name] == 1
        groups[number].append(adapted(models[number], adapter, is_alone=is_alone))
    return groups


def _base_of(given: str, base: str | None, models: Sequence[ServeSettings]) -> int:
    for number, one in enumerate(models):
        if base in one.names or (base is None and len(models) == 1):
            return number
    names = ", ".join(one.names[0] for one in models)
    got = "" if base is None else f", got {base}"
    raise InvalidRequestError(
        f"--adapter {given}: BASE in BASE+NAME=PATH must be one of {names}{got}"
    )


def adapted(model: ServeSettings, adapter: NamedAdapter, *, is_alone: bool = True) -> ServeSettings:
    """Return the settings `model` with `adapter`. `model.names` must be set. With `is_alone`, the
    adapter's own name is an alias."""
    return replace(
        model,
        engine=replace(model.engine, adapter=adapter),
        names=tuple(map(adapter.named, model.names)),
        aliases=frozenset((adapter.name,) if is_alone else ()),
        parent=model.names[0],
    )


def log_tenants(secret: bytes, tenants: Sequence[str]) -> None:
    """Log the id of each API key's tenant, derived with `secret`."""
    for number, name in enumerate(tenants, 1):
        found = tenant_id(secret, tenant_tag(secret, name))
        logger.info("API key %d of %d is tenant %s", number, len(tenants), found)


def sampling_of(settings: ServeSettings, folder: Path) -> SamplingParams:
    """Return the default sampling parameters. The model in `folder` supplies missing ones."""
    from semantic.adapters.mlx.model.description import read_sampling

    of_model = read_sampling(folder)
    temperature = of_model.temperature if settings.temperature is None else settings.temperature
    top_p = of_model.top_p if settings.top_p is None else settings.top_p
    top_k = of_model.top_k if settings.top_k is None else settings.top_k
    min_p = of_model.min_p if settings.min_p is None else settings.min_p
    return SamplingParams(temperature, top_p, top_k, min_p)
