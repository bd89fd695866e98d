"""Options of commands, each declared once, as fields of a dataclass.

`command` makes a typer command of a function whose parameters may be such dataclasses: each field
becomes an option. Knows typer and bootstrap's settings; not what a command does.
"""

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
from semantic.composition.engine_settings import DEFAULT_MODEL, NamedAdapter, Settings
from semantic.composition.named_models import model_name, model_of, parse_adapter
from semantic.composition.process_stores import STORE_VARIABLE
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import SamplingParams

Command: TypeAlias = Callable[..., None]

_GIB = 1 << 30

# Headings of the help.
_ENGINE = "Model and memory"
_STORE = "Store"
_SAMPLING = "Sampling"
_ADDRESS = "Address and access"
_TOP_P = "Nucleus sampling; 1 is off, 0 the likeliest token."
_SERVER_SAMPLING = (
    "Sampling of requests that do not set it; by default as the model's makers recommend"
)
_ANSWERS = "Answers"
_LIMITS = "Limits and deadlines"
_LOG = "Log"


def _flag(panel: str, text: str, *names: str, metavar: str | None = None) -> object:
    """An option with this `text` under a heading of the help."""
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
MaxTokens = Annotated[int, typer.Option(help="Maximum tokens of an answer.")]
StoreFolder = Annotated[
    Path | None,
    _flag(
        _STORE,
        f"The folder of the store. Default: ${STORE_VARIABLE}, else one in the user's folder "
        "of caches.",
        "--store",
    ),
]
DiskGb = Annotated[
    float | None,
    _flag(
        _STORE,
        "Quota of the store on disk, in GiB. Default: what it uses and a tenth of the free "
        "space, at most 32.",
    ),
]
DiskRatedTbw = Annotated[
    float | None,
    _flag(
        _STORE,
        "Terabytes that the store's drive is rated to write in its life (TBW), as its maker "
        "says: shows which part the store has used. Default: unknown.",
    ),
]
RamGb = Annotated[
    float | None,
    _flag(
        _STORE,
        "GiB of memory for blocks saved or read recently, in addition to the pool. Default: "
        "a sixteenth of the process' memory.",
    ),
]
PoolGb = Annotated[
    float | None,
    _flag(
        _ENGINE,
        "GiB for all agents' caches. Default: a quarter of the process' memory, at most what "
        "the weights leave.",
    ),
]
PoolBlocks = Annotated[
    int | None, _flag(_ENGINE, "Blocks of 256 tokens of one layer for all agents' caches.")
]
_MODEL = typer.Option(
    help="A model folder, a hub id (org/name), an alias or the model inside the package.",
    autocompletion=complete_models,
    rich_help_panel=_ENGINE,
)
_MODELS = typer.Option(
    help="A model folder, a hub id (org/name), an alias or the model inside the package. May be "
    "repeated: the first is that of requests that name none.",
    autocompletion=complete_models,
    rich_help_panel=_ENGINE,
)
ADAPTERS = _flag(
    _ENGINE,
    "A folder with an adapter that mlx-lm trained, served as BASE+NAME on the weights of "
    "its base; of several models BASE+NAME=PATH. May be repeated.",
    "--adapter",
    "--adapter-path",
    "--lora-modules",
    metavar="[NAME=]PATH",
)
Adapter = Annotated[
    str | None,
    _flag(
        _ENGINE,
        "A folder with an adapter that mlx-lm trained for the model, which is then BASE+NAME "
        "with agents of its own.",
        "--adapter",
        "--adapter-path",
        metavar="[NAME=]PATH",
    ),
]
_NO_STORE = _flag(
    _STORE, "Store nothing on disk: caches are lost when the program ends.", "--no-store"
)
_ANY_CHIP = _flag(
    _STORE,
    "Use blocks that other kinds of chips or BLAS kernels computed, which differ in "
    "their last bits: answers may differ from those of one machine alone.",
    "--share-across-chips",
)
RemoteStore = Annotated[
    str | None,
    _flag(
        _STORE,
        "The object store that the replicas of a fleet share: s3://bucket/prefix, gs://, "
        "az:// or file://. Credentials come from the environment; needs "
        "semantic-engine[fleet] and --fleet-secret-file.",
        metavar="URL",
    ),
]
RemoteGb = Annotated[
    float | None,
    _flag(
        _STORE,
        "GiB that the fleet may have in --remote-store: one of the processes with this "
        "option evicts what was not used for longest. Default: no limit.",
    ),
]
FleetSecretFile = Annotated[
    Path | None,
    _flag(
        _STORE,
        "A file with at least 32 random bytes, the same for every replica of a fleet: "
        "tenants' names in stores are derived from it. Default: each store has its own.",
    ),
]
KvEvents = Annotated[
    str | None,
    _flag(
        _STORE,
        "Publish which blocks this server stores, with their tokens, for routers that read "
        "vLLM's KV cache events: tcp://127.0.0.1:5557 or ipc://PATH; the next port answers "
        "those that missed some. All prompts can be read there. Needs "
        "semantic-engine[fleet].",
        metavar="ADDRESS",
    ),
]
ServerUrl = Annotated[
    str, typer.Option(help="The server's address; `semantic serve` prints it when it is ready.")
]
KeyVariable = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The environment variable with the API key or operator's key, if the server requires "
        "one. The key itself is never written or printed.",
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
    """The memory of a model's caches, and their store."""

    pool_gb: PoolGb = None
    pool_blocks: PoolBlocks = None
    store: StoreFolder = None
    no_store: Annotated[bool, _NO_STORE] = False
    disk_gb: DiskGb = None
    ram_gb: RamGb = None
    share_across_chips: Annotated[bool, _ANY_CHIP] = False
    fleet_secret_file: FleetSecretFile = None
    remote_store: RemoteStore = None

    def settings_of(self, model: str) -> Settings:
        """As bootstrap takes them for `model`, an alias replaced by its model.

        Raises InvalidRequestError for a budget of 0 or less.
        """
        if self.no_store and self.store is not None:
            raise InvalidRequestError("expected either --store or --no-store")
        return Settings(
            model_of(model),
            pool_bytes=gib("--pool-gb", self.pool_gb),
            pool_blocks=self.pool_blocks,
            use_disk=not self.no_store,
            store=self.store,
            disk_bytes=gib("--disk-gb", self.disk_gb),
            memory_bytes=gib("--ram-gb", self.ram_gb),
            any_chip=self.share_across_chips,
            fleet_secret=self.fleet_secret_file,
            remote=self.remote_store,
        )


@dataclass(frozen=True, slots=True)
class EngineOptions(CacheOptions):
    """The model, the memory of its caches, and their store."""

    model: Annotated[str, _MODEL] = DEFAULT_MODEL

    def settings(self, adapter: str | None = None) -> Settings:
        """`settings_of` the model, under the `adapter` of `--adapter`. Raises InvalidRequestError
        also for an adapter of another model."""
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
    """Models, the memory of their caches, and their store."""

    model: Annotated[list[str] | None, _MODELS] = None


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The store on disk."""

    store: StoreFolder = None
    disk_gb: DiskGb = None

    def settings(self) -> Settings:
        """As bootstrap takes them. Raises InvalidRequestError for a budget of 0 or less."""
        return Settings(use_disk=True, store=self.store, disk_bytes=gib("--disk-gb", self.disk_gb))


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The object store of a fleet."""

    remote_store: RemoteStore = None
    fleet_secret_file: FleetSecretFile = None

    def settings(self, remote_bytes: int | None = None) -> Settings:
        """As bootstrap takes them, with the budget of the object store."""
        return Settings(
            remote=self.remote_store,
            remote_bytes=remote_bytes,
            fleet_secret=self.fleet_secret_file,
        )


def gib(option: str, given: float | None) -> int | None:
    """`given` GiB in bytes. Raises InvalidRequestError, naming `option`, below one byte."""
    if given is None:
        return None
    n_bytes = given * _GIB
    if not 1 <= n_bytes < float("inf"):
        raise InvalidRequestError(f"{option} must be above 0, got {given}")
    return int(n_bytes)


def terabytes(given: float | None) -> int | None:
    """`given` terabytes, of 10^12 bytes as drives are rated, in bytes."""
    return None if given is None else int(given * 10**12)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen; greedy by default."""

    temperature: Annotated[float, _flag(_SAMPLING, "0 is greedy.")] = 0.0
    top_p: Annotated[float, _flag(_SAMPLING, _TOP_P)] = 1.0
    top_k: Annotated[int, _flag(_SAMPLING, "Only the k likeliest; 0 is off.")] = 0
    min_p: Annotated[
        float, _flag(_SAMPLING, "Only tokens this likely compared with the likeliest; 0 is off.")
    ] = 0.0
    seed: Annotated[int | None, _flag(_SAMPLING, "Makes sampling repeatable.")] = None
    stop: Annotated[
        list[str] | None, _flag(_SAMPLING, "End the answer before this text. May be repeated.")
    ] = None

    def params(self) -> SamplingParams:
        """As the engine takes them. Raises InvalidRequestError for a value out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Every setting of a server as a flag, under the names of other servers' flags.

    None means not given: the environment, the file or the default decides, in this order.
    """

    host: Annotated[str | None, _flag(_ADDRESS, "Address to listen on. Default: 127.0.0.1.")] = None
    port: Annotated[int | None, _flag(_ADDRESS, "Default: 8000; 0 takes a free one.")] = None
    api_keys: Annotated[
        list[str] | None,
        _flag(
            _ADDRESS,
            "A key that clients must send; each is a tenant of its own. May be repeated.",
            "--api-key",
        ),
    ] = None
    api_key_file: Annotated[Path | None, _flag(_ADDRESS, "A file of keys, one a line.")] = None
    operator_keys: Annotated[
        list[str] | None,
        _flag(
            _ADDRESS,
            "A key that reads /metrics and manages all tenants' agents. May be repeated.",
            "--operator-key",
        ),
    ] = None
    operator_key_file: Annotated[
        Path | None, _flag(_ADDRESS, "A file of operators' keys, one a line.")
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _flag(
            _ADDRESS, "A host name that requests may be sent to. May be repeated.", "--allowed-host"
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        _flag(
            _ADDRESS,
            "The origin of web pages that may send requests. May be repeated.",
            "--allowed-origin",
        ),
    ] = None
    public_prefix: Annotated[
        list[Path] | None,
        _flag(
            _ADDRESS,
            "A file with a system message, or messages and tools as JSON, whose prefix all "
            "tenants share. May be repeated.",
        ),
    ] = None
    model: Annotated[list[str] | None, _MODELS] = None
    allowed_models: Annotated[
        list[str] | None,
        _flag(
            _ENGINE,
            "A model that is loaded when a request names it. May be repeated.",
            "--allow-model",
        ),
    ] = None
    adapters: Annotated[list[str] | None, ADAPTERS] = None
    kept_models: Annotated[
        list[str] | None,
        _flag(
            _ENGINE,
            "A model, one of those given, that stays loaded. May be repeated.",
            "--keep-model",
        ),
    ] = None
    allow_pull: Annotated[
        list[str] | None,
        _flag(
            _ENGINE,
            "Hub ids, as org/name or org/*, that /api/pull may download and serve. May be "
            "repeated. Default: none.",
            metavar="PATTERN",
        ),
    ] = None
    models_gb: Annotated[
        float | None,
        _flag(
            _ENGINE,
            "GiB for all loaded models: weights, pools and the store's memory. Default: seven "
            "eighths of the process' memory, less what other parts need.",
        ),
    ] = None
    model_ttl: Annotated[
        float | None,
        _flag(
            _ENGINE,
            "Seconds without a request after which a model is unloaded. Default: when another "
            "one needs its memory.",
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        _flag(
            _ENGINE,
            "A name that requests may use for the first model, remembered as an alias of it. May "
            "be repeated. Default: the folder's name, or the hub id.",
        ),
    ] = None
    embedding_model: Annotated[
        str | None,
        _flag(
            _ENGINE, "A second model, for embeddings: a folder, a hub id (org/name) or an alias."
        ),
    ] = None
    max_model_len: Annotated[
        int | None, _flag(_ENGINE, "Maximum tokens of a prompt and its answer together.")
    ] = None
    max_batch: Annotated[
        int | None,
        _flag(_ENGINE, "Maximum requests in one batch.", "--max-batch", "--max-num-seqs"),
    ] = None
    max_waiting: Annotated[
        int | None, _flag(_ENGINE, "Maximum requests in the queue; more get a 503.")
    ] = None
    pool_gb: PoolGb = None
    pool_blocks: PoolBlocks = None
    store: StoreFolder = None
    no_store: Annotated[bool | None, _NO_STORE] = None
    disk_gb: DiskGb = None
    disk_writes_gb_per_day: Annotated[
        float | None,
        _flag(
            _STORE,
            "GiB that the store may write to disk a day; then only ends of turns are written "
            "until midnight. Default: no limit.",
        ),
    ] = None
    disk_rated_tbw: DiskRatedTbw = None
    ram_gb: RamGb = None
    share_across_chips: Annotated[bool | None, _ANY_CHIP] = None
    fleet_secret_file: FleetSecretFile = None
    remote_store: RemoteStore = None
    remote_gb: RemoteGb = None
    kv_events: KvEvents = None
    kv_events_topic: Annotated[
        str | None, _flag(_STORE, "The topic of these events; by default empty.")
    ] = None
    memory_gb: Annotated[
        float | None,
        _flag(
            _ENGINE,
            "GiB of memory that the process may have, as the system counts it. Near that, caches "
            "are given up, and last requests are refused with a 503. Default: nine tenths of "
            "what is free at the start, more if the weights need it.",
        ),
    ] = None
    temperature: Annotated[
        float | None, _flag(_SERVER_SAMPLING, "0 is greedy.", "--temp", "--temperature")
    ] = None
    top_p: Annotated[float | None, _flag(_SERVER_SAMPLING, _TOP_P)] = None
    top_k: Annotated[int | None, _flag(_SERVER_SAMPLING, "Only the k likeliest; 0 is off.")] = None
    min_p: Annotated[
        float | None,
        _flag(_SERVER_SAMPLING, "Only tokens this likely compared with the likeliest; 0 is off."),
    ] = None
    max_tokens: Annotated[
        int | None,
        _flag(
            _SERVER_SAMPLING, "Maximum tokens of an answer. Default: up to the end of the context."
        ),
    ] = None
    image_input: Annotated[
        str | None,
        _flag(
            _ANSWERS,
            "What becomes of a picture, sound or document that a user sends to a text model: "
            "note, reject-once or reject. Earlier ones and those of tools are always notes. "
            "Default: reject-once.",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _flag(
            _ANSWERS,
            "How the first model writes calls: a name of docs/families.md, as vLLM has them.",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _flag(_ANSWERS, "How the first model marks reasoning; none: its answers have none."),
    ] = None
    force_usage: Annotated[
        bool | None,
        _flag(
            _ANSWERS,
            "Send usage in streams to clients that did not request it.",
            "--force-usage",
            "--enable-force-include-usage",
        ),
    ] = None
    max_body_mb: Annotated[float | None, _flag(_LIMITS, "Maximum MiB of a request's body.")] = None
    max_header_kb: Annotated[int | None, _flag(_LIMITS, "Maximum KiB of its headers.")] = None
    max_headers: Annotated[int | None, _flag(_LIMITS, "Maximum number of its headers.")] = None
    max_connections: Annotated[
        int | None, _flag(_LIMITS, "Maximum connections with a request; more get a 503.")
    ] = None
    header_timeout: Annotated[
        float | None, _flag(_LIMITS, "Seconds for the headers to arrive.")
    ] = None
    body_timeout: Annotated[float | None, _flag(_LIMITS, "Seconds for the body to arrive.")] = None
    idle_timeout: Annotated[
        int | None, _flag(_LIMITS, "Seconds that a connection may be idle.")
    ] = None
    send_timeout: Annotated[
        float | None,
        _flag(_LIMITS, "Seconds after which a client that reads nothing is disconnected."),
    ] = None
    keep_alive: Annotated[
        float | None, _flag(_LIMITS, "Seconds between heartbeats in a stream without other data.")
    ] = None
    stop_timeout: Annotated[
        int | None, _flag(_LIMITS, "Seconds for answers to end when the server stops.")
    ] = None
    log_format: Annotated[str | None, _flag(_LOG, "text or json.")] = None
    log_level: Annotated[str | None, _flag(_LOG, "debug, info, warning or error.")] = None

    def given(self) -> dict[str, object]:
        """The flags that were given, by name of their setting."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


class CommandTable(NamedTuple):
    """Commands that a package adds to the program, by name: those with an engine's options, others,
    and for each group of commands its help text and its commands."""

    commands: Mapping[str, Command]
    apart: Mapping[str, Command]
    groups: Mapping[str, tuple[str, Mapping[str, Command]]]


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with an option for each field of its dataclass parameters, in `process_edge`."""
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
    # typer reads both.
    run.__dict__["__signature__"] = signature
    run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return run


def _spread(
    parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, type]
) -> inspect.Signature:
    """A signature in which each dataclass is replaced by its fields, inherited ones last."""
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
