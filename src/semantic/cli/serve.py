"""`semantic serve`: one model behind HTTP, for every agent that speaks a known wire.

Reads settings, opens the socket, runs the server and says how it went. What is answered is
decided elsewhere.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from semantic import __version__
from semantic.bootstrap import Settings, open_responses
from semantic.cli.edge import print_notice
from semantic.cli.options import gib
from semantic.cli.progress import say_that_the_disk_is_off
from semantic.cli.serve_options import ConfigFile, ServeOptions
from semantic.domain.errors import InvalidRequestError, StoreError

if TYPE_CHECKING:
    from semantic.adapters.http.lifecycle import Load, RunnableServing
    from semantic.adapters.http.settings import ServerSettings
    from semantic.bootstrap import StoreOff
    from semantic.ports.responses import ResponsesPort
    from semantic.ports.serving import ServingPort


def serve(options: ServeOptions, config: ConfigFile = None) -> None:
    """Serve a model over HTTP, for OpenAI's and Anthropic's clients.

    Every flag can also be set as SEMANTIC_NAME in the environment or in a TOML file; `semantic
    config show` tells what holds, and why. Ctrl-C lets answers end and saves every agent; a
    second one stops at once.
    """
    from semantic.adapters.http.errors import logger
    from semantic.adapters.http.settings import load_settings

    settings = load_settings(options.given(), config).settings
    responses = open_responses(engine_settings(settings), logger.warning)

    def disk_is_off(error: StoreError) -> None:
        responses.keep_in_memory()
        tell_that_the_disk_is_off(error)

    try:
        run_server(settings, partial(load_model, settings, disk_is_off), responses)
    finally:
        responses.close()


async def load_model(
    settings: ServerSettings, disk_is_off: StoreOff | None = None
) -> RunnableServing:
    """The model that `settings` name, ready to be asked. Raises as `serve.load_serving`."""
    from semantic.adapters.http.public_prefix import read_public_prefix
    from semantic.application.engine.admission import QueueLimits
    from semantic.serve import ServeSettings, load_serving

    wanted = ServeSettings(
        engine_settings(settings),
        names=settings.served_model_name,
        max_context=settings.max_model_len,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
        limits=QueueLimits(settings.max_waiting),
        public=tuple(map(read_public_prefix, settings.public_prefix)),
    )
    return await load_serving(wanted, disk_is_off or tell_that_the_disk_is_off)


def engine_settings(settings: ServerSettings) -> Settings:
    """The part of a server's settings that says what to build."""
    return Settings(
        settings.model,
        pool_bytes=gib("pool_gb", settings.pool_gb),
        pool_blocks=settings.pool_blocks,
        use_disk=not settings.no_store,
        store=settings.store,
        disk_bytes=gib("disk_gb", settings.disk_gb),
        memory_bytes=gib("ram_gb", settings.ram_gb),
        max_batch=settings.max_batch,
    )


def run_server(
    settings: ServerSettings, load: Load, responses: ResponsesPort | None = None
) -> None:
    """Serve until a signal comes, or the model cannot be loaded. Without `responses` they are kept
    in memory.

    Raises InvalidRequestError when others could reach the server without a key, OperatorError
    when the address cannot be used, and what loading raises.
    """
    from semantic.adapters.http.app import create_app
    from semantic.adapters.http.context import ServerContext
    from semantic.adapters.http.lifecycle import Lifecycle
    from semantic.adapters.http.logs import configure_logs
    from semantic.adapters.http.server import address, listen, make_server
    from semantic.cli.serve_progress import progress_bar

    require_keys(settings)
    configure_logs(settings.log_format, settings.log_level)
    bound = listen(settings)
    where = address(settings.host, bound.getsockname()[1])
    context = ServerContext(version=__version__)

    def ready(serving: ServingPort) -> None:
        server.refresh_connection_limits()
        _say_ready(where, serving)

    lifecycle = Lifecycle(context, load, ready)
    app = create_app(
        settings=settings,
        lifecycle=lifecycle,
        context=context,
        progress=progress_bar(),
        responses=responses,
    )
    server = make_server(app, settings, stopping=lambda: _tell("stopping"))
    lifecycle.on_failure(server.stop)
    _tell(f"http://{where} answers probes; loading {settings.model}")
    server.run(sockets=[bound])
    if lifecycle.failure is not None:
        raise lifecycle.failure
    _tell("stopped")


def require_keys(settings: ServerSettings) -> None:
    """Raises InvalidRequestError when others could reach the server without a key."""
    if not settings.is_local and not settings.api_keys:
        raise InvalidRequestError(
            f"others can reach {settings.host}: expected --api-key, --api-key-file or "
            "SEMANTIC_API_KEYS, or a loopback --host such as 127.0.0.1"
        )


def _say_ready(where: str, serving: ServingPort) -> None:
    model = serving.model
    tokens = f"{model.context_tokens} tokens of context"
    _tell(f"ready: http://{where}/v1 serves {model.id} with {tokens}")


def tell_that_the_disk_is_off(error: StoreError) -> None:
    """As `say_that_the_disk_is_off`, where somebody can read it."""
    with suppress(OSError):
        say_that_the_disk_is_off(error)


def _tell(message: str) -> None:
    """A notice, where somebody can read it: a log that broke must not end a server, nor keep it
    from saving its agents."""
    with suppress(OSError):
        print_notice(message)
