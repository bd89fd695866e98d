"""`semantic serve` and `semantic config show`."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

from semantic import __version__
from semantic.cli.edge import print_notice
from semantic.cli.options import AsJson, ConfigFile, gib, option, terabytes
from semantic.cli.progress import print_store_unavailable, server_progress
from semantic.cli.report import columns, show_bytes
from semantic.cli.terminal import write
from semantic.composition.engine_settings import Settings
from semantic.composition.framework import read_device
from semantic.composition.memory_shares import default_process_bytes, guard_memory, promised
from semantic.composition.named_models import kv_bits_of, model_of, own_names, remember_served
from semantic.composition.plugins import placement
from semantic.composition.process_stores import default_store_folder, fleet_secret, open_responses
from semantic.domain.errors import InvalidRequestError, OperatorError, SemanticError, StoreError
from semantic_server.declared_settings import DeclaredSettings

if TYPE_CHECKING:
    from semantic.application.engine.step_loop import StepLoop
    from semantic.application.models.model_manager import RunnableServing
    from semantic.bootstrap import OnStoreUnavailable
    from semantic.domain.value_objects import KvBits
    from semantic.ports.store import ResponsesPort
    from semantic.serve import ServeSettings
    from semantic_server.http.lifecycle import Load
    from semantic_server.http.settings import ServerSettings

T = TypeVar("T")

_GIB = 1 << 30


def with_flags(declared: type) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds an optional flag for each setting of `declared`."""

    def add(options: type[T]) -> type[T]:
        hints = get_type_hints(declared, include_extras=True)
        options.__annotations__ = {name: _as_flag(hint) for name, hint in hints.items()}
        for name in hints:
            setattr(options, name, None)
        return options

    return add


def _as_flag(hint: object) -> object:
    declared, *_, flag = get_args(hint)
    given = _given(declared)
    return Annotated[given | None, option(flag)]


def _given(declared: type) -> type | GenericAlias:
    """Return the type of a flag's value. It is `str` if only loading the settings can validate the
    value."""
    origin, parts = get_origin(declared), get_args(declared)
    if origin is None:
        return str if declared is object else declared
    if origin is tuple:
        return GenericAlias(list, (_given(parts[0]),))
    return str if origin is Literal else _given(parts[0])


@dataclass(frozen=True)
@with_flags(DeclaredSettings)
class ServeOptions:
    """Every setting of a server as a flag. None means that the flag is missing."""

    def given(self) -> dict[str, object]:
        """Return the flags on the command line as a mapping from setting to value."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def serve(options: ServeOptions, config: ConfigFile = None) -> None:
    """Serve a model over HTTP, for OpenAI's and Anthropic's clients.

    Every flag also works as SEMANTIC_NAME in the environment or in a TOML file; `semantic config
    show` prints each value and its source. Ctrl-C waits for answers and saves every agent; a second
    Ctrl-C stops at once.
    """
    from semantic.composition.process_stores import require_chosen_store
    from semantic_server.http.errors import logger
    from semantic_server.http.settings import load_settings

    # Dump all stacks. A Python handler holds the interpreter lock; without the lock, reading the
    # stack of a running thread crashes.
    signal.signal(signal.SIGUSR1, lambda *_: faulthandler.dump_traceback(file=2))
    settings = load_settings(options.given(), config).settings
    if engine_settings(settings).ranks is not None and follow_rank(settings):
        return
    require_chosen_store(engine_settings(settings))
    responses = open_responses(engine_settings(settings), logger.warning)

    def store_unavailable(error: StoreError) -> None:
        responses.disable_disk()
        notify_store_unavailable(error)

    try:
        run_server(settings, partial(_load_and_remember, settings, store_unavailable), responses)
    finally:
        responses.close()


def follow_rank(settings: ServerSettings) -> bool:
    """On rank 0, return False at once. On other ranks, compute until rank 0 ends, then return True.
    Raises InvalidRequestError for settings that work on only one device."""
    from semantic.bootstrap import follow_first
    from semantic_server.http.logs import configure_logs

    if settings.has_managed_models or settings.embedding_model is not None:
        raise InvalidRequestError(
            "several ranks serve exactly one --model: remove adapters, models on demand and the "
            "embedding model"
        )
    engine = engine_settings(settings)
    if engine.ranks is None or engine.ranks.rank == 0:
        return False
    configure_logs(settings.log_format, settings.log_level)
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # every rank gets the signal: rank 0 saves, then all end
    follow_first(engine)
    return True


def show(options: ServeOptions, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Print the settings file, and the value and source of every setting of `semantic serve`.

    Flags override the environment, the environment overrides the file, and the file overrides the
    defaults. Secrets are masked.
    """
    from semantic_server.http.settings import load_settings

    loaded = load_settings(options.given(), config)
    values = {**loaded.as_json(), **_chosen(loaded.settings)}
    there = "" if loaded.file.exists() else ", no such file"
    origin = "flag" if config else f"default{there}"
    rows: dict[str, tuple[object, str]] = {"config": (str(loaded.file), origin)}
    for name, value in values.items():
        later = _CHOSEN_LATER.get(name) if value is None or name == "memory_gb" else None
        origin = loaded.origins[name]
        rows[name] = value, f"{origin}, {later}" if later and origin == "default" else origin
    if as_json:
        found = {name: {"value": value, "origin": origin} for name, (value, origin) in rows.items()}
        write(json.dumps(found, indent=2) + "\n")
        return
    lines = [(name, json.dumps(value), origin) for name, (value, origin) in rows.items()]
    write("\n".join(columns(lines)) + "\n")


_FROM_MODEL = "from the model's own configuration"
_CHOSEN_LATER = {
    "disk_gb": "from the free space",
    "disk_writes_gb_per_day": "no limit",
    "disk_rated_tbw": "unknown",
    "ram_gb": "from the memory",
    "remote_gb": "no limit",
    "memory_gb": "nine tenths of what is free, more if the weights need it",
    "pool_gb": "from the memory that the weights leave",
    "max_model_len": "from the model and the pool",
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), _FROM_MODEL),
    "max_tokens": "up to the end of the context",
}
"""The values that the server chooses for unset settings when it starts."""


def _chosen(settings: ServerSettings) -> dict[str, object]:
    chosen: dict[str, object] = {}
    if not settings.served_model_name:
        chosen["served_model_name"] = list(served_names(settings))
    if settings.store is None and not settings.no_store:
        with suppress(StoreError):  # there is no home folder: the disk tier is off
            chosen["store"] = str(default_store_folder())
    if settings.memory_gb is None:
        with suppress(OperatorError):  # MLX is not usable: the start says why
            chosen["memory_gb"] = round(default_process_bytes(read_device()) / _GIB, 2)
    return chosen


CONFIG_COMMANDS: dict[str, Callable[..., None]] = {"show": show}


async def load_model(
    settings: ServerSettings, store_unavailable: OnStoreUnavailable | None = None, sharing: int = 1
) -> RunnableServing:
    """Load the models in `settings`. They are then ready for requests. Raises the same errors as
    `serve.load_serving` and `serve_models.load_models`."""
    import asyncio

    from semantic.application.engine.step_loop import StepLoop
    from semantic.serve import load_embeddings

    loop, embedding = StepLoop(), None
    engine = await asyncio.wrap_future(loop.call(partial(promised_of, settings, sharing)))
    guard_memory(loop, engine, logging.getLogger("semantic.server").info)
    promise = show_bytes(engine.process_bytes or 0)
    _print_line(f"memory: at most {promise} for this process; --memory-gb sets it")
    if settings.embedding_model is not None:
        model = model_of(settings.embedding_model)
        names = own_names(model, settings.embedding_model)
        # Load the embedding model first, so that the pools take only the memory that it leaves.
        embedding = await load_embeddings(model, names, loop)
    store_unavailable = store_unavailable or notify_store_unavailable
    details = None if embedding is None else embedding.model.details
    reserved = 0 if details is None else details.memory_bytes
    first = _serve_settings(settings, engine)
    serving = await _load_answering(settings, first, store_unavailable, loop, reserved)
    serving.embedding, serving.memory = embedding, loop
    return serving


def promised_of(settings: ServerSettings, sharing: int = 1) -> Settings:
    """Return the engine's settings with the memory limit of this process. `sharing` is the number
    of processes on the machine. Raises the same errors as `promised`."""
    others = map(model_of, (*settings.model[1:], *settings.allowed_models))
    embedding = settings.embedding_model
    return promised(
        engine_settings(settings),
        tuple(others),
        None if embedding is None else model_of(embedding),
        sharing,
    )


async def _load_answering(
    settings: ServerSettings,
    first: ServeSettings,
    store_unavailable: OnStoreUnavailable,
    loop: StepLoop,
    reserved: int,
) -> RunnableServing:
    from semantic.serve import load_serving

    if not settings.has_managed_models:
        return await load_serving(first, store_unavailable, loop=loop)
    from semantic.serve_models import ModelsSettings, load_models

    others = (*settings.model[1:], *settings.allowed_models)
    models = [first, *(_of_model(first, one, settings) for one in others)]
    from semantic.serve import with_adapters

    groups = with_adapters(models, settings.adapters)
    return await load_models(
        ModelsSettings(
            [one for group in groups for one in group],
            loaded=sum(map(len, groups[: len(settings.model)])),
            kept=settings.kept_models,
            max_bytes=gib("models_gb", settings.models_gb),
            ttl=settings.model_ttl,
            max_waiting=settings.max_waiting,
            reserved_bytes=reserved,
        ),
        store_unavailable,
        loop,
    )


def _of_model(first: ServeSettings, name: str, settings: ServerSettings) -> ServeSettings:
    model = model_of(name)
    names = own_names(model, name)
    engine = replace(first.engine, model=model, kv_bits=_kv_bits(settings, names))
    parsers = replace(first.parsers, calls=None, reasoning=None)
    return replace(first, engine=engine, names=names, parsers=parsers)


def _serve_settings(settings: ServerSettings, engine: Settings) -> ServeSettings:
    from semantic.application.chat.families import Parsers
    from semantic.application.engine.admission import QueueLimits
    from semantic.serve import ServeSettings
    from semantic_server.http.identity import tenant_name
    from semantic_server.http.lifecycle import read_public_prefix

    return ServeSettings(
        engine,
        names=served_names(settings),
        any_name=settings.any_model_name,
        max_context=settings.max_model_len,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
        image_input=settings.image_input,
        parsers=Parsers(settings.tool_call_parser, settings.reasoning_parser),
        limits=QueueLimits(settings.max_waiting, shared=len(settings.api_keys) > 1),
        public=tuple(map(read_public_prefix, settings.public_prefix)),
        tenants=tuple(tenant_name(key.get_secret_value()) for key in settings.api_keys),
        events=(settings.kv_events, settings.kv_events_topic) if settings.kv_events else None,
    )


async def _load_and_remember(
    settings: ServerSettings, store_unavailable: OnStoreUnavailable
) -> RunnableServing:
    serving = await load_model(settings, store_unavailable)
    remember(settings)
    return serving


def remember(settings: ServerSettings) -> None:
    """Save the configured names as aliases of the model. A failure only prints a notice."""
    try:
        remember_served(settings.model[0], settings.served_model_name)
    except SemanticError as error:
        _print_line(f"cannot remember --served-model-name: {error}")


def served_names(settings: ServerSettings) -> tuple[str, ...]:
    """Return the names that requests may use for the model in `settings`."""
    return settings.served_model_name or own_names(model_of(settings.model[0]), settings.model[0])


def _kv_bits(settings: ServerSettings, names: Sequence[str]) -> KvBits:
    models = (*settings.model, *settings.allowed_models)
    known = [name for one in models for name in own_names(model_of(one), one)]
    return kv_bits_of(settings.kv_bits, names, (*settings.served_model_name, *known))


def engine_settings(settings: ServerSettings) -> Settings:
    """Return the engine's settings, with aliases resolved. Raises InvalidRequestError."""
    model = model_of(settings.model[0])
    engine = Settings(
        model,
        pool_bytes=gib("pool_gb", settings.pool_gb),
        pool_blocks=settings.pool_blocks,
        use_disk=not settings.no_store,
        store=settings.store,
        disk_bytes=gib("disk_gb", settings.disk_gb),
        disk_bytes_a_day=gib("disk_writes_gb_per_day", settings.disk_writes_gb_per_day),
        disk_rated_bytes=terabytes(settings.disk_rated_tbw),
        memory_bytes=gib("ram_gb", settings.ram_gb),
        max_batch=settings.max_batch,
        process_bytes=gib("memory_gb", settings.memory_gb),
        any_chip=settings.share_across_chips,
        exact_batch=settings.exact_batch,
        drafts=settings.drafts,
        kv_bits=_kv_bits(settings, (*served_names(settings), *own_names(model, settings.model[0]))),
        kv_bits_force=settings.kv_bits_force,
        fleet_secret=settings.fleet_secret_file,
        remote=settings.remote_store,
        remote_bytes=gib("remote_gb", settings.remote_gb),
    )
    return replace(engine, ranks=placement(os.environ, partial(fleet_secret, engine)))


def run_server(
    settings: ServerSettings, load: Load, responses: ResponsesPort | None = None
) -> None:
    """Serve until a signal arrives or loading the model fails. Raises InvalidRequestError for a
    public address without keys, OperatorError if binding fails, and the same errors as `load`."""
    from semantic_server.http.app import create_app
    from semantic_server.http.context import ServerContext
    from semantic_server.http.lifecycle import Lifecycle
    from semantic_server.http.logs import configure_logs
    from semantic_server.http.server import address, listen, make_server

    require_keys(settings)
    configure_logs(settings.log_format, settings.log_level)
    bound = listen(settings)
    where = address(settings.host, bound.getsockname()[1])
    context = ServerContext(version=__version__)

    def ready(serving: RunnableServing) -> None:
        server.refresh_connection_limits()
        _print_ready(where, serving)

    lifecycle = Lifecycle(context, load, ready)
    app = create_app(
        settings=settings,
        lifecycle=lifecycle,
        context=context,
        progress=server_progress(),
        responses=responses,
    )
    server = make_server(app, settings, on_stop=lambda: _print_line("stopping"))
    lifecycle.on_failure(server.stop)
    _print_line(f"loading {settings.model[0]} for http://{where}")
    server.run(sockets=[bound])
    if lifecycle.failure is not None:
        raise lifecycle.failure
    _print_line("stopped")


def require_keys(settings: ServerSettings) -> None:
    """Raise InvalidRequestError if the address is not loopback and there are no keys."""
    if not settings.is_local and not settings.api_keys:
        raise InvalidRequestError(
            f"others can reach {settings.host}: expected --api-key, --api-key-file or "
            "SEMANTIC_API_KEYS, or a loopback --host such as 127.0.0.1"
        )


def _print_ready(where: str, serving: RunnableServing) -> None:
    model = serving.model
    tokens = f"{model.context_tokens} tokens of context"
    others = [] if serving.models is None else [one.served.id for one in serving.models.statuses()]
    more = f", and {', '.join(others[1:])}" if others[1:] else ""
    _print_line(f"ready: http://{where}/v1 serves {model.id} with {tokens}{more}")
    _print_line(f"http://{where} is its page; semantic launch AGENT connects; Ctrl-C stops it")


def notify_store_unavailable(error: StoreError) -> None:
    """Print a notice that the store is unavailable. Ignores a closed stderr."""
    with suppress(OSError):
        print_store_unavailable(error)


def _print_line(message: str) -> None:
    """Print a notice. A closed stderr does not stop the server."""
    with suppress(OSError):
        print_notice(message)
