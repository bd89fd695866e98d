"""`semantic models suggest` and `search`: which model for this machine."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.cli.options import AsJson
from semantic.cli.report import Json, columns, show_bytes, show_name, to_line
from semantic.composition.framework import read_device
from semantic.composition.known_models import KnownModel, known_models
from semantic.composition.memory_shares import default_pool_bytes, default_process_bytes
from semantic.domain.errors import ModelNotFoundError

if TYPE_CHECKING:
    from semantic.adapters.mlx.device import Device

AGENT_TOKENS = 100_000
"""The length of a long session of a coding agent, in tokens."""
CODING_TOKENS = 64 * 1024
"""The fewest tokens of context that coding agents work with."""
_LEAST_TOKENS = 16 * 1024
"""The fewest tokens of a pool that make a model worth a line."""
_HEADINGS = ("model", "download", "context", "per 100k", "agents", "for")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A model on this machine, and the tokens that the pool beside its weights holds: 0 if the
    weights do not fit."""

    model: KnownModel
    pool_tokens: int

    @property
    def agents(self) -> int:
        """The number of agents of 100,000 tokens in the pool, if they share nothing."""
        return self.pool_tokens // AGENT_TOKENS

    @property
    def is_for_coding(self) -> bool:
        return min(self.pool_tokens, self.model.context_tokens) >= CODING_TOKENS

    def as_json(self) -> Json:
        own = {"pool_tokens": self.pool_tokens, "agents": self.agents}
        return {**asdict(self.model), **own, "is_for_coding": self.is_for_coding}


def suggestions(device: Device) -> list[Suggestion]:
    """Return all known models, best for coding agents first."""
    # A user can close other programs, but a Mac's GPU may use only a part of the memory.
    machine = device
    if device.kind != "Metal":
        machine = replace(device, free_bytes=device.memory_bytes)

    def suggest(model: KnownModel) -> Suggestion:
        memory = default_process_bytes(machine, model.n_bytes)
        pool = default_pool_bytes(memory, model.n_bytes)
        fits = model.n_bytes + pool <= memory
        return Suggestion(model, pool // model.token_bytes * fits)

    return [suggest(one) for one in known_models()]


def best(found: Sequence[Suggestion]) -> Suggestion | None:
    """Return the first model for coding agents, or None."""
    return next((one for one in found if one.is_for_coding), None)


def sizes_of(model: KnownModel) -> tuple[str, str, str]:
    """Return what tables say of the download, the context and an agent of 100,000 tokens."""
    agent = show_bytes(AGENT_TOKENS * model.token_bytes)
    return show_bytes(model.n_bytes), f"{model.context_tokens // 1024}k", agent


def suggest(as_json: AsJson = False) -> None:
    """Suggest models for this machine; a mark is at the first choice for coding agents.

    "Per 100k" is the memory for an agent of 100,000 tokens. "Agents" is how many of them fit beside
    the weights if they share nothing, or how long one can be. `--model` takes each name.
    """
    device = read_device()
    found = suggestions(device)
    document: Json = {"models": [one.as_json() for one in found]}
    typer.echo(to_line(document) if as_json else "\n".join(_lines(device, found)))


def search(
    words: Annotated[list[str], typer.Argument(help="Words of the name.", show_default=False)],
    limit: Annotated[int, typer.Option(min=1, max=100, help="The most models to list.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Search the hub for models in MLX's format, the most downloaded first."""
    from semantic.adapters.hub.remote import search_models

    text = " ".join(words)
    found = search_models(text, limit)
    if as_json:
        typer.echo(to_line({"models": [asdict(one) for one in found]}))
        return
    if not found:
        raise ModelNotFoundError(f"the hub has no model for MLX with {text!r} in its name")
    rows = [(show_name(one.hub_id, whole=True), str(one.downloads), one.changed) for one in found]
    typer.echo("\n".join(columns([("model", "downloads", "changed"), *rows])))
    typer.echo("\n`semantic models show MODEL` says how much memory one needs.")


def _lines(device: Device, found: list[Suggestion]) -> Iterator[str]:
    yield f"{device.chip}: {show_bytes(device.memory_bytes)} of memory"
    choice = best(found)
    fitting = [one for one in found if one.pool_tokens >= _LEAST_TOKENS]
    if fitting:
        yield ""
        rows = [_row(one, "*" if one is choice else "") for one in fitting]
        yield from columns([("", *_HEADINGS), *rows])
    larger = [one.model.name for one in found if one.pool_tokens < _LEAST_TOKENS]
    if larger:
        yield ""
        yield from textwrap.wrap(f"too large for this machine: {', '.join(larger)}", 80)
    if choice is not None:
        yield "\n`semantic code` fetches and serves the marked one and starts a coding agent."


def _row(one: Suggestion, mark: str) -> tuple[str, ...]:
    agents = str(one.agents) if one.agents else f"up to {one.pool_tokens // 1024}k"
    return (mark, one.model.name, *sizes_of(one.model), agents, one.model.good_for)
