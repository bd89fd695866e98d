"""The flags of `semantic serve`, under the names that users of other servers know.

A flag that is not given is left to the environment, the file and the default, in this order: what
those are is written in one place, the server's settings. Loads nothing of the server.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from semantic.bootstrap import STORE_VARIABLE

_ADDRESS = "Address and access"
_ENGINE = "Model and memory"
_STORE = "Store"
_SAMPLING = "Sampling, where a request says nothing; else as the model's makers recommend"
_ANSWERS = "Answers"
_LIMITS = "Limits and deadlines"
_LOG = "Log"

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file with settings, else semantic/config.toml among the user's.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Every setting of a server as a flag. None is: not given."""

    host: Annotated[
        str | None,
        typer.Option(help="Where to listen; 127.0.0.1 unless set.", rich_help_panel=_ADDRESS),
    ] = None
    port: Annotated[
        int | None,
        typer.Option(help="8000 unless set; 0 takes a free one.", rich_help_panel=_ADDRESS),
    ] = None
    api_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            help="A key that clients must send; each is a tenant of its own. May be given again.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of keys, one a line.", rich_help_panel=_ADDRESS)
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            help="A host name that requests may be sent to. May be given again.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            help="The origin of web pages that may send requests. May be given again.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None
    public_prefix: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file with a system message, or messages and tools as JSON, whose beginning "
            "all tenants may share. May be given again.",
            rich_help_panel=_ADDRESS,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="A model folder, a hub id (org/name) or the model inside the package.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that requests may use for the model. May be given again.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="The most tokens a prompt and its answer may have together.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    max_batch: Annotated[
        int | None,
        typer.Option(
            "--max-batch",
            "--max-num-seqs",
            help="The most requests that are computed together.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    max_waiting: Annotated[
        int | None,
        typer.Option(
            help="More requests than this in the queue get a 503.", rich_help_panel=_ENGINE
        ),
    ] = None
    pool_gb: Annotated[
        float | None,
        typer.Option(
            help="GiB for all agents' caches. Without a limit: a quarter of the memory, "
            "at most what the weights leave.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    pool_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of 256 tokens of one layer for all agents' caches.",
            rich_help_panel=_ENGINE,
        ),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            help=f"The folder that keeps caches. Else ${STORE_VARIABLE}, else one among the "
            "user's caches.",
            rich_help_panel=_STORE,
        ),
    ] = None
    no_store: Annotated[
        bool | None,
        typer.Option(
            "--no-store",
            help="Keep nothing on disk: caches end with the program.",
            rich_help_panel=_STORE,
        ),
    ] = None
    disk_gb: Annotated[
        float | None,
        typer.Option(
            help="GiB that the store may take on disk. Without a limit: a tenth of what is free "
            "beside what it has, at most 32.",
            rich_help_panel=_STORE,
        ),
    ] = None
    ram_gb: Annotated[
        float | None,
        typer.Option(
            help="GiB of memory for blocks saved or read lately, beside the pool. Without a "
            "limit: a sixteenth of the memory.",
            rich_help_panel=_STORE,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option("--temp", "--temperature", help="0 is greedy.", rich_help_panel=_SAMPLING),
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus sampling; 0 is off.", rich_help_panel=_SAMPLING)
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(help="Only the k likeliest; 0 is off.", rich_help_panel=_SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Only tokens this likely compared with the likeliest; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of an answer. Without it: what the context has room for.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    force_usage: Annotated[
        bool | None,
        typer.Option(
            "--force-usage",
            "--enable-force-include-usage",
            help="Tell usage in streams to clients that did not ask for it.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None
    max_body_mb: Annotated[
        float | None, typer.Option(help="MiB that a request may have.", rich_help_panel=_LIMITS)
    ] = None
    max_header_kb: Annotated[
        int | None, typer.Option(help="KiB that its headers may have.", rich_help_panel=_LIMITS)
    ] = None
    max_headers: Annotated[
        int | None, typer.Option(help="How many headers it may have.", rich_help_panel=_LIMITS)
    ] = None
    max_connections: Annotated[
        int | None, typer.Option(help="More connections get a 503.", rich_help_panel=_LIMITS)
    ] = None
    header_timeout: Annotated[
        float | None, typer.Option(help="Seconds for headers to come.", rich_help_panel=_LIMITS)
    ] = None
    body_timeout: Annotated[
        float | None, typer.Option(help="Seconds for a body to come.", rich_help_panel=_LIMITS)
    ] = None
    idle_timeout: Annotated[
        int | None,
        typer.Option(help="Seconds that a connection may do nothing.", rich_help_panel=_LIMITS),
    ] = None
    send_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a client that reads nothing is left.",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    keep_alive: Annotated[
        float | None,
        typer.Option(
            help="Seconds between signs of life in a stream that has nothing else to say.",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    stop_timeout: Annotated[
        int | None,
        typer.Option(
            help="Seconds that answers have to end when the server stops.",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    log_format: Annotated[str | None, typer.Option(help="text or json.", rich_help_panel=_LOG)] = (
        None
    )
    log_level: Annotated[
        str | None,
        typer.Option(help="debug, info, warning or error.", rich_help_panel=_LOG),
    ] = None

    def given(self) -> dict[str, object]:
        """The flags that were given, by the names of their settings."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}
