"""Options of commands, as fields of dataclasses."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias, get_type_hints

import typer

from semantic.cli.edge import process_edge
from semantic.cli.shell.completion import complete_models
from semantic.composition.engine_settings import (
    ADAPTER,
    ANY_CHIP,
    DEFAULT_MODEL,
    DISK_GB,
    DISK_RATED_TBW,
    DRAFTS,
    EXACT_BATCH,
    FLEET_SECRET_FILE,
    KV_BITS,
    KV_BITS_FORCE,
    MIN_P_HELP,
    MODEL,
    MODELS,
    NO_STORE,
    POOL_BLOCKS,
    POOL_GB,
    RAM_GB,
    REMOTE_GB,
    REMOTE_STORE,
    STORE_FOLDER,
    TOP_K_HELP,
    TOP_P_HELP,
    Flag,
    NamedAdapter,
    Settings,
)
from semantic.composition.named_models import (
    kv_bits_of,
    model_name,
    model_of,
    own_names,
    parse_adapter,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import Drafts, ExactBatch, SamplingParams

_SAMPLING = "Sampling"

Command: TypeAlias = Callable[..., None]

_GIB = 1 << 30


def option(flag: Flag) -> object:
    return typer.Option(
        *flag.names,
        help=flag.text,
        rich_help_panel=flag.panel,
        metavar=flag.metavar,
        autocompletion=complete_models if flag.completes_models else None,
    )


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
MaxTokens = Annotated[int, typer.Option(help="Maximum tokens of an answer.")]
StoreFolder = Annotated[Path | None, option(STORE_FOLDER)]
DiskGb = Annotated[float | None, option(DISK_GB)]
DiskRatedTbw = Annotated[float | None, option(DISK_RATED_TBW)]
PoolGb = Annotated[float | None, option(POOL_GB)]
Adapter = Annotated[str | None, option(ADAPTER)]
RemoteStore = Annotated[str | None, option(REMOTE_STORE)]
RemoteGb = Annotated[float | None, option(REMOTE_GB)]
FleetSecretFile = Annotated[Path | None, option(FLEET_SECRET_FILE)]
ServerUrl = Annotated[
    str, typer.Option(help="The server's address; `semantic serve` prints it when it is ready.")
]
KeyVariable = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The environment variable with the API key or operator's key, if the server requires "
        "one. No program writes or prints the key itself.",
    ),
]
DEFAULT_SERVER = "http://127.0.0.1:8000"
DEFAULT_KEY_VARIABLE = "SEMANTIC_API_KEY"
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file. Default: semantic/config.toml in the user's folder of settings.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class CacheOptions:
    pool_gb: PoolGb = None
    pool_blocks: Annotated[int | None, option(POOL_BLOCKS)] = None
    store: StoreFolder = None
    no_store: Annotated[bool, option(NO_STORE)] = False
    disk_gb: DiskGb = None
    ram_gb: Annotated[float | None, option(RAM_GB)] = None
    share_across_chips: Annotated[bool, option(ANY_CHIP)] = False
    exact_batch: Annotated[ExactBatch, option(EXACT_BATCH)] = "auto"
    drafts: Annotated[Drafts, option(DRAFTS)] = "auto"
    kv_bits: Annotated[list[str] | None, option(KV_BITS)] = None
    kv_bits_force: Annotated[bool, option(KV_BITS_FORCE)] = False
    fleet_secret_file: FleetSecretFile = None
    remote_store: RemoteStore = None

    def settings_of(self, model: str) -> Settings:
        """Return an engine's settings for these options. Raises InvalidRequestError for a budget of
        0 or less."""
        if self.no_store and self.store is not None:
            raise InvalidRequestError("expected either --store or --no-store")
        found = model_of(model)
        return Settings(
            found,
            pool_bytes=gib("--pool-gb", self.pool_gb),
            pool_blocks=self.pool_blocks,
            use_disk=not self.no_store,
            store=self.store,
            disk_bytes=gib("--disk-gb", self.disk_gb),
            memory_bytes=gib("--ram-gb", self.ram_gb),
            any_chip=self.share_across_chips,
            exact_batch=self.exact_batch,
            drafts=self.drafts,
            kv_bits=kv_bits_of(self.kv_bits or (), own_names(found, model)),
            kv_bits_force=self.kv_bits_force,
            fleet_secret=self.fleet_secret_file,
            remote=self.remote_store,
        )


@dataclass(frozen=True, slots=True)
class EngineOptions(CacheOptions):
    model: Annotated[str, option(MODEL)] = DEFAULT_MODEL

    def settings(self, adapter: str | None = None) -> Settings:
        """Return the engine's settings for the model and its `adapter`. Raises the same errors as
        `settings_of`, and InvalidRequestError for another model's adapter."""
        found = self.settings_of(self.model)
        return found if adapter is None else replace(found, adapter=self._adapter(adapter))

    def _adapter(self, given: str) -> NamedAdapter:
        base, adapter = parse_adapter(given)
        names = {self.model, model_name(model_of(self.model))}
        if base is not None and base not in names:
            raise InvalidRequestError(
                f"--adapter {given[:200]}: expected an adapter of {self.model}"
            )
        return adapter


@dataclass(frozen=True, slots=True)
class ModelsOptions(CacheOptions):
    model: Annotated[list[str] | None, option(MODELS)] = None


@dataclass(frozen=True, slots=True)
class StoreOptions:
    store: StoreFolder = None
    disk_gb: DiskGb = None

    def settings(self) -> Settings:
        """Return an engine's settings for these options. Raises InvalidRequestError for a budget of
        0 or less."""
        return Settings(use_disk=True, store=self.store, disk_bytes=gib("--disk-gb", self.disk_gb))


@dataclass(frozen=True, slots=True)
class FleetOptions:
    remote_store: RemoteStore = None
    fleet_secret_file: FleetSecretFile = None

    def settings(self, remote_bytes: int | None = None) -> Settings:
        """Return an engine's settings. `remote_bytes` is the budget of the object store."""
        return Settings(
            remote=self.remote_store, remote_bytes=remote_bytes, fleet_secret=self.fleet_secret_file
        )


def gib(option: str, given: float | None) -> int | None:
    """Return `given` GiB as a number of bytes. Raises InvalidRequestError for less than a byte and
    for infinity. The message names `option`."""
    if given is None:
        return None
    n_bytes = given * _GIB
    if not 1 <= n_bytes < float("inf"):
        raise InvalidRequestError(f"{option} must be above 0, got {given}")
    return int(n_bytes)


def terabytes(given: float | None) -> int | None:
    """Return `given` terabytes (10^12 bytes) as a number of bytes."""
    return None if given is None else int(given * 10**12)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How to sample the next token; greedy by default."""

    temperature: Annotated[float, option(Flag(_SAMPLING, "0 is greedy."))] = 0.0
    top_p: Annotated[float, option(Flag(_SAMPLING, TOP_P_HELP))] = 1.0
    top_k: Annotated[int, option(Flag(_SAMPLING, TOP_K_HELP))] = 0
    min_p: Annotated[float, option(Flag(_SAMPLING, MIN_P_HELP))] = 0.0
    seed: Annotated[int | None, option(Flag(_SAMPLING, "Makes sampling repeatable."))] = None
    stop: Annotated[
        list[str] | None, option(Flag(_SAMPLING, "End the answer before this text. Repeatable."))
    ] = None

    def params(self) -> SamplingParams:
        """Return these options as sampling parameters. Raises InvalidRequestError for a value out
        of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


class CommandTable(NamedTuple):
    """The commands of a package by name. `commands` have the engine's options; commands in `apart`
    do not. A group has a help text and commands."""

    commands: Mapping[str, Command]
    apart: Mapping[str, Command]
    groups: Mapping[str, tuple[str, Mapping[str, Command]]]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a typer command. Each field of a dataclass parameter becomes an option."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    groups = {
        name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)
    }

    @functools.wraps(function)
    def run(**given: object) -> None:
        values = dict(given)
        for name, group in groups.items():
            own = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(**own)
        with process_edge():
            function(**values)

    signature = _spread(inspect.signature(function).parameters, hints)
    # typer reads both attributes.
    run.__dict__["__signature__"] = signature
    run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return run


def _spread(
    parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, type]
) -> inspect.Signature:
    flat: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        hint = hints[name]
        if not is_dataclass(hint):
            flat.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        own = get_type_hints(hint, include_extras=True)
        flat += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=own[field.name],
            )
            for field in sorted(fields(hint), key=lambda one: one.name not in hint.__annotations__)
        ]
    return inspect.Signature(flat)
