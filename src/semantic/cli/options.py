"""Options that several commands share, each declared once, as fields of a dataclass.

`command` makes a command of a function whose parameters may be such dataclasses: each field
becomes an option. Knows typer and bootstrap's settings; not what a command does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, get_type_hints

import typer

from semantic.bootstrap import DEFAULT_MODEL, STORE_VARIABLE, Settings
from semantic.cli.edge import process_edge
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import SamplingParams

_GIB = 1 << 30
_ENGINE = "Model and memory"
_STORE = "Store"
_SAMPLING = "Sampling"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens an answer may have.")]
StoreFolder = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help=f"The folder that keeps caches. Else ${STORE_VARIABLE}, else one among the user's "
        "caches.",
        show_default=False,
        rich_help_panel=_STORE,
    ),
]
DiskGb = Annotated[
    float | None,
    typer.Option(
        help="GiB that the store may take on disk. Without a limit: a tenth of what is free "
        "beside what it has, at most 32.",
        show_default=False,
        rich_help_panel=_STORE,
    ),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which model, how much memory its caches may take, and where they are kept."""

    model: Annotated[
        str,
        typer.Option(
            help="A model folder, a hub id (org/name) or the model inside the package.",
            rich_help_panel=_ENGINE,
        ),
    ] = DEFAULT_MODEL
    pool_gb: Annotated[
        float | None,
        typer.Option(
            help="GiB for all agents' caches. Without a limit: a quarter of the memory, "
            "at most what the weights leave.",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None
    pool_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of 256 tokens of one layer for all agents' caches.",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None
    store: StoreFolder = None
    no_store: Annotated[
        bool,
        typer.Option(
            "--no-store",
            help="Keep nothing on disk: caches end with the program.",
            rich_help_panel=_STORE,
        ),
    ] = False
    disk_gb: DiskGb = None
    ram_gb: Annotated[
        float | None,
        typer.Option(
            help="GiB of memory for blocks saved or read lately, beside the pool. Without a "
            "limit: a sixteenth of the memory.",
            show_default=False,
            rich_help_panel=_STORE,
        ),
    ] = None

    def settings(self) -> Settings:
        """What bootstrap needs. Raises InvalidRequestError for a budget without room."""
        if self.no_store and self.store is not None:
            raise InvalidRequestError("expected either --store or --no-store")
        return Settings(
            self.model,
            pool_bytes=gib("--pool-gb", self.pool_gb),
            pool_blocks=self.pool_blocks,
            use_disk=not self.no_store,
            store=self.store,
            disk_bytes=gib("--disk-gb", self.disk_gb),
            memory_bytes=gib("--ram-gb", self.ram_gb),
        )


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Which store on disk."""

    store: StoreFolder = None
    disk_gb: DiskGb = None

    def settings(self) -> Settings:
        """What bootstrap needs. Raises InvalidRequestError for a budget without room."""
        return Settings(use_disk=True, store=self.store, disk_bytes=gib("--disk-gb", self.disk_gb))


def gib(option: str, given: float | None) -> int | None:
    """The bytes that an option gives in GiB. Raises InvalidRequestError for no room at all."""
    if given is None:
        return None
    n_bytes = given * _GIB
    if not 1 <= n_bytes < float("inf"):
        raise InvalidRequestError(f"{option} must be above 0, got {given}")
    return int(n_bytes)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen; greedy unless told otherwise."""

    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = (
        0.0
    )
    top_p: Annotated[
        float, typer.Option(help="Nucleus sampling; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_k: Annotated[
        int, typer.Option(help="Only the k likeliest; 0 is off.", rich_help_panel=_SAMPLING)
    ] = 0
    min_p: Annotated[
        float,
        typer.Option(
            help="Only tokens this likely compared with the likeliest; 0 is off.",
            rich_help_panel=_SAMPLING,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes sampling repeatable.", show_default=False, rich_help_panel=_SAMPLING
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="End the answer before this text. May be given again.",
            show_default=False,
            rich_help_panel=_SAMPLING,
        ),
    ] = None

    def params(self) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with an option for each field of its dataclass parameters, at the edge."""
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
    # typer reads the signature and the annotations of what it is given.
    run.__dict__["__signature__"] = signature
    run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return run


def _spread(
    parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, type]
) -> inspect.Signature:
    """A signature in which each dataclass is replaced by its fields."""
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
            for field in fields(hint)
        ]
    return inspect.Signature(flat)
