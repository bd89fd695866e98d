"""`semantic fleet`: several identical servers behind one address, as replicas on Ray Serve."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from semantic import __version__
from semantic.cli.edge import print_notice
from semantic.cli.options import CommandTable, ConfigFile
from semantic.composition.process_stores import default_store_folder, shared_store
from semantic.domain.errors import InvalidRequestError, SemanticError, StoreError
from semantic_fleet.cli.fleet_cache import FLEET_COMMANDS
from semantic_server.cli.serve import ServeOptions, engine_settings, remember, require_keys

if TYPE_CHECKING:
    import asyncio

    from fastapi import FastAPI

    from semantic_fleet.replicas.ray_cluster import FleetPlan, RayCluster
    from semantic_server.http.settings import ServerSettings

_FLEET = "Fleet"
_FOLDER = "fleet"
"""The name of the fleet's folder in the store's folder."""

RayAddress = Annotated[
    str | None,
    typer.Option(
        help="Address of a running Ray cluster, or auto. Default: start one for this "
        "command, on this machine.",
        show_default=False,
        rich_help_panel=_FLEET,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        min=0,
        max=86_400,
        help="Seconds that a stopping replica waits for its answers; then they end with an error.",
        rich_help_panel=_FLEET,
    ),
]


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The number of replicas and their resources."""

    replicas: Annotated[
        int, typer.Option(min=1, max=256, help="Least number of replicas.", rich_help_panel=_FLEET)
    ] = 2
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Most replicas; more start while requests wait. Default: the same as --replicas.",
            show_default=False,
            rich_help_panel=_FLEET,
        ),
    ] = None
    upscale_delay: Annotated[
        float,
        typer.Option(
            min=0,
            max=86_400,
            help="Seconds that requests must have waited before Ray adds a replica.",
            rich_help_panel=_FLEET,
        ),
    ] = 10.0
    downscale_delay: Annotated[
        float,
        typer.Option(
            min=0,
            max=86_400,
            help="Seconds that fewer replicas must have sufficed before Ray removes one.",
            rich_help_panel=_FLEET,
        ),
    ] = 120.0
    replica_requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 16,
            help="Concurrent requests of a replica; more go to another. Default: --max-batch.",
            show_default=False,
            rich_help_panel=_FLEET,
        ),
    ] = None
    replicas_per_machine: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Most replicas on one machine; they share its memory. Default: all, or one "
            "with --ray-address.",
            show_default=False,
            rich_help_panel=_FLEET,
        ),
    ] = None
    replica_gpus: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=64,
            help="GPUs of a replica, as Ray counts them. Default: one if there are any.",
            show_default=False,
            rich_help_panel=_FLEET,
        ),
    ] = None
    drain_timeout: DrainTimeout = 300.0
    ray_address: RayAddress = None

    @property
    def most(self) -> int:
        """The largest number of replicas that can run."""
        return self.max_replicas or self.replicas

    @property
    def per_machine(self) -> int:
        """The largest number of replicas that run on one machine."""
        return self.replicas_per_machine or (self.most if self.ray_address is None else 1)


def serve(options: ServeOptions, fleet: ReplicaOptions, config: ConfigFile = None) -> None:
    """Serve a model with several replicas behind one address, on Ray Serve.

    Takes all options of `semantic serve` except --allow-pull. Each replica has its own memory and
    its own folder in --store, and all share --remote-store. A session stays with one replica while
    that replica has room. Needs semantic-engine[fleet].
    """
    from semantic_fleet.cli.served_replica import BuildServedReplica
    from semantic_fleet.replicas.ray_cluster import RayCluster
    from semantic_server.http.logs import configure_logs
    from semantic_server.http.server import address, listen, make_server
    from semantic_server.http.settings import load_settings

    settings = load_settings(options.given(), config).settings
    check_fleet(settings, fleet)
    configure_logs(settings.log_format, settings.log_level)
    cluster = RayCluster(plan_of(settings, fleet), BuildServedReplica(settings))
    bound = listen(settings)
    where = address(settings.host, bound.getsockname()[1])
    life = _FleetLife(cluster, lambda: _print_ready(where, settings, fleet))
    server = make_server(
        _edge(cluster, settings, life), settings, on_stop=lambda: print_notice("stopping")
    )
    life.on_failure = server.stop
    print_notice(f"http://{where} answers probes; starting {fleet.replicas} replicas")
    server.run(sockets=[bound])
    if life.failure is not None:
        raise life.failure
    print_notice("stopped")


def stop(ray_address: RayAddress = "auto", drain_timeout: DrainTimeout = 300.0) -> None:
    """Stop the replicas that `semantic fleet serve --ray-address` started on a cluster.

    Answers finish, and replicas save their agents.
    """
    from semantic_fleet.replicas.ray_cluster import stop_application

    stop_application(ray_address or "auto", drain_timeout)
    print_notice("stopped")


REPLICA_COMMANDS: dict[str, Callable[..., None]] = {"serve": serve, "stop": stop}

TABLE: Final = CommandTable(
    commands={},
    apart={},
    groups={
        "cache": ("", FLEET_COMMANDS),
        "fleet": ("Several servers that share agents, on Ray.", REPLICA_COMMANDS),
    },
)


def check_fleet(settings: ServerSettings, fleet: ReplicaOptions) -> None:
    """Raise InvalidRequestError for settings that a fleet does not support. Starts nothing."""
    require_keys(settings)
    if fleet.most < fleet.replicas:
        raise InvalidRequestError(
            f"--max-replicas {fleet.most}: expected at least --replicas, {fleet.replicas}"
        )
    if settings.allow_pull:
        raise InvalidRequestError(
            "--allow-pull: not available in a fleet, where only one replica would have the model; "
            "run `semantic models pull` on each machine, and use --allow-model"
        )
    if settings.kv_events is not None:
        raise InvalidRequestError(
            "--kv-events: not available in a fleet, whose edge chooses the replicas"
        )
    if settings.remote_store is None:
        raise InvalidRequestError(
            "expected --remote-store and --fleet-secret-file: replicas share agents, turns and "
            "responses there"
        )
    shared_store(engine_settings(settings))  # checks the settings without connecting


def plan_of(settings: ServerSettings, fleet: ReplicaOptions) -> FleetPlan:
    """Return the plan of the fleet. Raises InvalidRequestError without a folder for the store."""
    from semantic_fleet.replicas.ray_cluster import FleetPlan

    return FleetPlan(
        fleet.replicas,
        fleet.most,
        fleet.replica_requests or settings.max_batch,
        settings.max_waiting,
        fleet.drain_timeout,
        str(_folder_of(settings)),
        fleet.per_machine,
        fleet.upscale_delay,
        fleet.downscale_delay,
        fleet.replica_gpus,
        fleet.ray_address,
    )


def _folder_of(settings: ServerSettings) -> Path:
    if settings.store is not None:
        return settings.store.absolute()
    try:
        return default_store_folder().absolute().with_name(_FOLDER)
    except StoreError as error:
        raise InvalidRequestError(f"expected --store: {error}") from error


def _edge(cluster: RayCluster, settings: ServerSettings, life: _FleetLife) -> FastAPI:
    from semantic_fleet.replicas.fleet_edge import create_edge

    return create_edge(cluster, settings, life.lifespan, __version__)


def _print_ready(where: str, settings: ServerSettings, fleet: ReplicaOptions) -> None:
    remember(settings)
    more = f" to {fleet.most}" if fleet.most > fleet.replicas else ""
    print_notice(
        f"ready: http://{where}/v1 serves {settings.model[0]} by {fleet.replicas}{more} replicas"
    )


def _take_signals_back() -> None:
    """Restore the signal handlers that Ray replaced. Ray's own handlers print stacks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.getsignal(number))


class _FleetLife:
    """Starts the cluster before the server and stops it last. `failure` is the first error."""

    def __init__(self, cluster: RayCluster, ready: Callable[[], None]) -> None:
        self._cluster = cluster
        self._ready = ready
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        import asyncio

        starting = asyncio.ensure_future(asyncio.to_thread(self._cluster.start))
        starting.add_done_callback(self._has_started)
        try:
            yield
        finally:
            await asyncio.wait((starting,))  # Ray cannot stop while it is starting
            try:
                await asyncio.to_thread(self._cluster.stop)
            except SemanticError as error:
                self.failure = self.failure or error

    def _has_started(self, start: asyncio.Future[None]) -> None:
        _take_signals_back()
        self.failure = start.exception()
        if self.failure is None:
            self._ready()
        else:
            self.on_failure()
