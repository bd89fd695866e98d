"""Every setting of a server, with its type, bounds, default and help text. Imports neither pydantic
nor typer, so `semantic --help` is instant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from annotated_types import Ge, Gt, Le, Len

from semantic.composition.engine_settings import (
    ADAPTERS,
    ANY_CHIP,
    DEFAULT_MODEL,
    DISK_GB,
    DISK_RATED_TBW,
    DRAFTS,
    ENGINE,
    EXACT_BATCH,
    FLEET_SECRET_FILE,
    KV_BITS,
    KV_BITS_FORCE,
    MIN_P_HELP,
    MODELS,
    NO_STORE,
    POOL_BLOCKS,
    POOL_GB,
    RAM_GB,
    REMOTE_GB,
    REMOTE_STORE,
    STORE,
    STORE_FOLDER,
    TOP_K_HELP,
    TOP_P_HELP,
    Flag,
)
from semantic.domain.value_objects import Drafts, ExactBatch

Texts = tuple[str, ...]
Paths = tuple[Path, ...]
Keys = tuple[object, ...]
"""The type of API keys."""
Port = Annotated[int, Ge(0), Le(65_535)]
Seconds = Annotated[float, Gt(0), Le(86_400)]
Count = Annotated[int, Ge(1)]
Gib = Annotated[float, Gt(0), Le(1 << 20)]
Part = Annotated[float, Ge(0), Le(1)]

# Headings of the help.
_ADDRESS: Final = "Address and access"
_SAMPLING: Final = (
    "Sampling of requests that do not set it; by default as the model's makers recommend"
)
_ANSWERS: Final = "Answers"
_LIMITS: Final = "Limits and deadlines"
_LOG: Final = "Log"


@dataclass(init=False, repr=False, eq=False)
class DeclaredSettings:
    """All settings, in the order of the help. A size is in the unit that its name gives. A time is
    in seconds."""

    host: Annotated[str, Flag(_ADDRESS, "Address to listen on. Default: 127.0.0.1.")] = "127.0.0.1"
    port: Annotated[Port, Flag(_ADDRESS, "Port; 0 takes a free one. Default: 8000.")] = 8000
    api_keys: Annotated[
        Keys,
        Flag(
            _ADDRESS,
            "A key that clients must send; each key is a tenant of its own. Repeatable.",
            "--api-key",
        ),
    ] = ()
    api_key_file: Annotated[Path | None, Flag(_ADDRESS, "A file of keys, one per line.")] = None
    operator_keys: Annotated[
        Keys,
        Flag(
            _ADDRESS,
            "A key that reads /metrics and manages all tenants' agents. Repeatable.",
            "--operator-key",
        ),
    ] = ()
    operator_key_file: Annotated[
        Path | None, Flag(_ADDRESS, "A file of operators' keys, one per line.")
    ] = None
    allowed_hosts: Annotated[
        Texts, Flag(_ADDRESS, "A host name that requests may name. Repeatable.", "--allowed-host")
    ] = ()
    allowed_origins: Annotated[
        Texts,
        Flag(
            _ADDRESS,
            "The origin of web pages that may send requests. Repeatable.",
            "--allowed-origin",
        ),
    ] = ()
    public_prefix: Annotated[
        Paths,
        Flag(
            _ADDRESS,
            "A file with a system message, or messages and tools as JSON, whose prefix all "
            "tenants share. Repeatable.",
        ),
    ] = ()
    model: Annotated[Texts, Len(min_length=1), MODELS] = (DEFAULT_MODEL,)
    allowed_models: Annotated[
        Texts,
        Flag(ENGINE, "A model that loads when a request names it. Repeatable.", "--allow-model"),
    ] = ()
    adapters: Annotated[Texts, ADAPTERS] = ()
    kept_models: Annotated[
        Texts,
        Flag(ENGINE, "One of the given models that stays loaded. Repeatable.", "--keep-model"),
    ] = ()
    allow_pull: Annotated[
        Texts,
        Flag(
            ENGINE,
            "Hub ids, as org/name or org/*, that /api/pull may download and serve. Repeatable. "
            "Default: none.",
            metavar="PATTERN",
        ),
    ] = ()
    models_gb: Annotated[
        Gib | None,
        Flag(
            ENGINE,
            "GiB for all loaded models: weights, pools and the store's memory. Default: seven "
            "eighths of the process' memory, less what other parts need.",
        ),
    ] = None
    model_ttl: Annotated[
        Annotated[float, Ge(0), Le(1e9)] | None,
        Flag(
            ENGINE,
            "Seconds without a request after which a model unloads. Default: when another one "
            "needs its memory.",
        ),
    ] = None
    served_model_name: Annotated[
        Texts,
        Flag(
            ENGINE,
            "A name that requests may use for the first model, remembered as an alias of it. "
            "Repeatable. Default: the folder's name, or the hub id.",
        ),
    ] = ()
    any_model_name: Annotated[
        bool,
        Flag(ENGINE, "Every name in a request means the one model; answers give the same name."),
    ] = False
    embedding_model: Annotated[
        str | None,
        Flag(ENGINE, "A second model, for embeddings: a folder, a hub id (org/name) or an alias."),
    ] = None
    max_model_len: Annotated[
        Count | None, Flag(ENGINE, "Maximum tokens of a prompt and its answer together.")
    ] = None
    max_batch: Annotated[
        Count, Flag(ENGINE, "Maximum requests in one batch.", "--max-batch", "--max-num-seqs")
    ] = 32
    max_waiting: Annotated[
        Count, Flag(ENGINE, "Maximum requests in the queue; more get a 503.")
    ] = 256
    exact_batch: Annotated[ExactBatch, EXACT_BATCH] = "auto"
    drafts: Annotated[Drafts, DRAFTS] = "auto"
    kv_bits: Annotated[Texts, KV_BITS] = ()
    kv_bits_force: Annotated[bool, KV_BITS_FORCE] = False
    pool_gb: Annotated[Gib | None, POOL_GB] = None
    pool_blocks: Annotated[Count | None, POOL_BLOCKS] = None
    store: Annotated[Path | None, STORE_FOLDER] = None
    no_store: Annotated[bool, NO_STORE] = False
    disk_gb: Annotated[Gib | None, DISK_GB] = None
    disk_writes_gb_per_day: Annotated[
        Gib | None,
        Flag(
            STORE,
            "GiB that the store may write to disk per day; beyond that it writes only ends of "
            "turns until midnight. Default: no limit.",
        ),
    ] = None
    disk_rated_tbw: Annotated[Annotated[float, Gt(0), Le(1e6)] | None, DISK_RATED_TBW] = None
    ram_gb: Annotated[Gib | None, RAM_GB] = None
    share_across_chips: Annotated[bool, ANY_CHIP] = False
    fleet_secret_file: Annotated[Path | None, FLEET_SECRET_FILE] = None
    remote_store: Annotated[str | None, REMOTE_STORE] = None
    remote_gb: Annotated[Gib | None, REMOTE_GB] = None
    kv_events: Annotated[
        str | None,
        Flag(
            STORE,
            "Publish which blocks this server stores, with their tokens, for routers that read "
            "vLLM's KV cache events: tcp://127.0.0.1:5557 or ipc://PATH; the next port resends "
            "missed events. The events reveal all prompts. Needs "
            "semantic-engine[fleet].",
            metavar="ADDRESS",
        ),
    ] = None
    kv_events_topic: Annotated[str, Flag(STORE, "The topic of these events; by default empty.")] = (
        ""
    )
    memory_gb: Annotated[
        Gib | None,
        Flag(
            ENGINE,
            "GiB of memory that the process may use, as the system counts it. Near this limit it "
            "frees caches, and finally refuses requests with a 503. Default: nine tenths of the "
            "free memory at the start, more if the weights need it.",
        ),
    ] = None
    temperature: Annotated[
        Annotated[float, Ge(0), Le(100)] | None,
        Flag(_SAMPLING, "0 is greedy.", "--temp", "--temperature"),
    ] = None
    top_p: Annotated[Part | None, Flag(_SAMPLING, TOP_P_HELP)] = None
    top_k: Annotated[Annotated[int, Ge(0)] | None, Flag(_SAMPLING, TOP_K_HELP)] = None
    min_p: Annotated[Part | None, Flag(_SAMPLING, MIN_P_HELP)] = None
    max_tokens: Annotated[
        Count | None,
        Flag(_SAMPLING, "Maximum tokens of an answer. Default: up to the end of the context."),
    ] = None
    image_input: Annotated[
        Literal["note", "reject-once", "reject"],
        Flag(
            _ANSWERS,
            "How to answer a picture, sound or document that a user sends to a text model: "
            "note, reject-once or reject. Earlier files and files from tools are always notes. "
            "Default: reject-once.",
        ),
    ] = "reject-once"
    tool_call_parser: Annotated[
        str | None,
        Flag(
            _ANSWERS,
            "How the first model writes tool calls: a name from docs/families.md, as in vLLM.",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None, Flag(_ANSWERS, "How the first model marks reasoning; none if it never reasons.")
    ] = None
    force_usage: Annotated[
        bool,
        Flag(
            _ANSWERS,
            "Send usage in streams to clients that did not request it.",
            "--force-usage",
            "--enable-force-include-usage",
        ),
    ] = False
    max_body_mb: Annotated[
        float, Gt(0), Le(4096), Flag(_LIMITS, "Maximum MiB of a request's body.")
    ] = 16
    max_header_kb: Annotated[int, Ge(1), Le(1024), Flag(_LIMITS, "Maximum KiB of its headers.")] = (
        64
    )
    max_headers: Annotated[
        int, Ge(1), Le(10_000), Flag(_LIMITS, "Maximum number of its headers.")
    ] = 200
    max_connections: Annotated[
        Count, Flag(_LIMITS, "Maximum connections with a request in progress; more get a 503.")
    ] = 512
    header_timeout: Annotated[Seconds, Flag(_LIMITS, "Seconds for the headers to arrive.")] = 10
    body_timeout: Annotated[Seconds, Flag(_LIMITS, "Seconds for the body to arrive.")] = 60
    idle_timeout: Annotated[
        int, Ge(1), Le(86_400), Flag(_LIMITS, "Seconds that a connection may be idle.")
    ] = 75
    send_timeout: Annotated[
        Seconds,
        Flag(_LIMITS, "Seconds after which the server disconnects a client that reads nothing."),
    ] = 60
    keep_alive: Annotated[
        Seconds, Flag(_LIMITS, "Seconds between heartbeats in a stream without other data.")
    ] = 10
    stop_timeout: Annotated[
        int,
        Ge(0),
        Le(86_400),
        Flag(_LIMITS, "Seconds for answers to finish when the server stops."),
    ] = 5
    log_format: Annotated[Literal["text", "json"], Flag(_LOG, "text or json.")] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Flag(_LOG, "debug, info, warning or error.")
    ] = "info"
