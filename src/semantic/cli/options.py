"""Options that several commands share, each declared once, as fields of a dataclass.

`command` makes a command of a function whose parameters may be such dataclasses: each field
becomes an option. Knows typer and bootstrap's settings; not what a command does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, get_type_hints

import typer

from semantic.bootstrap import DEFAULT_MODEL, Settings
from semantic.cli.edge import process_edge
from semantic.domain.errors import InvalidRequestError
from semantic.domain.value_objects import SamplingParams

_GIB = 1 << 30
_ENGINE = "Model and memory"
_SAMPLING = "Sampling"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")]
MaxTokens = Annotated[int, typer.Option(help="The most tokens an answer may have.")]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Which model, and how much memory its caches may take."""

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

    def settings(self) -> Settings:
        """What bootstrap needs. Raises InvalidRequestError for a pool without room."""
        n_bytes = None if self.pool_gb is None else self.pool_gb * _GIB
        if n_bytes is not None and not 1 <= n_bytes < float("inf"):
            raise InvalidRequestError(f"--pool-gb must be above 0, got {self.pool_gb}")
        return Settings(
            self.model,
            pool_bytes=None if n_bytes is None else int(n_bytes),
            pool_blocks=self.pool_blocks,
        )


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
