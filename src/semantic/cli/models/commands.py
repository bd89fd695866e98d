"""`semantic models`: lists, shows, downloads and deletes models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.cli.edge import EXIT_INTERRUPTED, print_error, print_notice
from semantic.cli.models.choosing import search, suggest
from semantic.cli.models.facts import (
    AGENT_TOKENS,
    Capacity,
    ModelFacts,
    Place,
    aliases_of_models,
    facts_of,
    find_place,
    hub_id_of,
    local_models,
    remote_facts,
)
from semantic.cli.options import AsJson, PoolGb, gib
from semantic.cli.progress import download_bar
from semantic.cli.report import Json, columns, show_bytes, show_name, to_line
from semantic.cli.shell.completion import complete_models
from semantic.cli.terminal import is_interactive
from semantic.composition.engine_settings import DEFAULT_MODEL
from semantic.composition.named_models import find_remote, model_of, permanent_name, similar_model
from semantic.domain.errors import (
    CapacityError,
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
)

if TYPE_CHECKING:
    from semantic.adapters.hub.remote import RemoteModel
    from semantic.adapters.mlx.model.description import ModelDescription

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A hub id (org/name), a folder or an alias.",
        autocompletion=complete_models,
        show_default=False,
    ),
]
_HEADINGS = ("model", "aliases", "size", "caches", "a token", "agents of 32k", "fits")


def ls(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...", help="Folders with models to list too.", show_default=False
        ),
    ] = None,
    pool_gb: PoolGb = None,
    as_json: AsJson = False,
) -> None:
    """List the models on this machine: in the hub's cache, behind aliases and in folders.

    "A token" is the memory for one more token of an agent. "Agents of 32k" is how many agents of
    32,768 tokens fit into the pool if they share nothing.
    """
    found = list(local_models(folders or (), gib("--pool-gb", pool_gb)))
    if as_json:
        typer.echo(to_line({"models": [facts.as_json() for facts in found]}))
        return
    typer.echo("\n".join(columns([_HEADINGS, *map(_row, found)])))


def show(model: ModelName, pool_gb: PoolGb = None, as_json: AsJson = False) -> None:
    """Show a model and the memory it needs; if it is not on this machine, as the hub describes
    it."""
    pool_bytes = gib("--pool-gb", pool_gb)
    try:
        place = find_place(model)
    except ModelNotFoundError as error:
        raise _with_similar(error, model) from error
    if place is None:
        facts = remote_facts(_on_hub(model), pool_bytes)
    else:
        facts = facts_of(place, aliases_of_models(), pool_bytes)
    typer.echo(to_line(facts.as_json()) if as_json else "\n".join(_details(facts)))


def pull(
    model: ModelName,
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Download the model even if it cannot load on this machine."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Also check the hashes of weights already here.")
    ] = False,
    pool_gb: PoolGb = None,
    as_json: AsJson = False,
) -> None:
    """Download a model, or complete one, checking every file by its size and hash.

    An interrupted download continues where it stopped. A model that cannot load on this machine is
    refused before anything is downloaded.
    """
    from semantic.adapters.hub import download
    from semantic.adapters.mlx.model.provider import HUB_FILES

    remote = _on_hub(model)
    facts = remote_facts(remote, gib("--pool-gb", pool_gb))
    if not anyway:
        _require_usable(facts)
    for path in download.drop_damaged(remote) if check else ():
        print_notice(f"{path} was damaged: downloading it again")
    download.require_space(remote)
    missing = download.missing_bytes(remote)
    with _interruptible(remote), download_bar(remote.hub_id, missing) as on_bytes:
        folder = download.pull(remote, HUB_FILES, on_bytes)
    if as_json:
        done = {**facts.as_json(), "source": "hub's cache", "folder": str(folder), "complete": True}
        typer.echo(to_line({**done, "fetched_bytes": missing}))
        return
    fetched = f"{show_bytes(missing)} fetched" if missing else "nothing was missing"
    typer.echo(f"{remote.hub_id}: {show_bytes(remote.n_bytes)}, {fetched}, in {folder}")
    typer.echo("\n".join(_holds(facts)))


def rm(
    model: ModelName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a model from the hub's cache, never a folder."""
    from semantic.adapters.hub.hub_cache import remove_cached

    hub_id = hub_id_of(model)
    try:
        n_bytes = remove_cached(hub_id, dry_run=True)
    except ModelNotFoundError as error:
        raise _with_similar(error, hub_id) from error
    question = f"delete {hub_id} from the hub's cache and free {show_bytes(n_bytes)}?"
    if not yes:
        if not is_interactive() or as_json:
            raise InvalidRequestError(f"cannot ask: {question} Add --yes")
        typer.confirm(question, abort=True)
    remove_cached(hub_id)
    document: Json = {"name": hub_id, "removed": True, "freed_bytes": n_bytes}
    text = f"deleted {hub_id}, which frees {show_bytes(n_bytes)}"
    typer.echo(to_line(document) if as_json else text)


def alias(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The short name.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A hub id or a folder.", show_default=False),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Forget the name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a model a short name that --model accepts everywhere; without a model, show the names.

    `semantic serve --served-model-name` adds names too, unless another model has them.
    """
    from semantic.adapters.hub.aliases import remove_alias, set_alias

    if remove:
        if name is None or model is not None:
            raise InvalidRequestError("expected --remove with only a name")
        if not remove_alias(name):
            raise _no_alias(name)
        _print(as_json, f"forgot {show_name(name)}", {"name": name, "removed": True})
        return
    if name is None or model is None:
        _show_aliases(name, as_json)
        return
    if name == DEFAULT_MODEL:
        raise InvalidRequestError(
            f"{name!r} is the model inside the package: expected another name"
        )
    meant = permanent_name(model_of(model))
    place = find_place(meant)
    set_alias(name, meant)
    document: Json = {"name": name, "model": meant, "here": place is not None}
    later = "" if place else ", which is not here yet"
    _print(as_json, f"{name} now means {meant}{later}", document)


MODEL_COMMANDS: dict[str, Callable[..., None]] = {
    "suggest": suggest,
    "search": search,
    "ls": ls,
    "show": show,
    "pull": pull,
    "rm": rm,
    "alias": alias,
}


def _on_hub(name: str) -> RemoteModel:
    hub_id = hub_id_of(name)
    try:
        return find_remote(hub_id)
    except ModelNotFoundError as error:
        raise _with_similar(error, hub_id) from error
    except OperatorError as error:
        raise OperatorError(f"{error}{_did_you_mean(hub_id)}") from error


def _with_similar(error: ModelNotFoundError, name: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"{error}{_did_you_mean(name)}")


def _did_you_mean(name: str) -> str:
    alike = similar_model(name)
    return f"; did you mean {alike}?" if alike else ""


def _require_usable(facts: ModelFacts) -> None:
    name, capacity = facts.place.name, facts.capacity
    if capacity is None:
        raise OperatorError(f"{name}: {facts.problem}; --anyway fetches it")
    if not capacity.fits:
        raise CapacityError(f"{name} {_too_large(capacity)}; --anyway fetches it")


@contextmanager
def _interruptible(model: RemoteModel) -> Iterator[None]:
    from semantic.adapters.hub.download import missing_bytes

    try:
        yield
    except KeyboardInterrupt:
        print_error(
            f"interrupted: {show_bytes(missing_bytes(model))} of {model.hub_id} are missing, and "
            "the same command continues from there"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _show_aliases(name: str | None, as_json: bool) -> None:
    from semantic.adapters.hub.aliases import read_aliases

    known = read_aliases()
    found = {one: meant for one, meant in known.all().items() if name in (None, one)}
    if name is not None and not found:
        raise _no_alias(name)
    listed = [
        {"name": one, "model": meant, "by": "user" if one in known.aliases else "serve"}
        for one, meant in sorted(found.items())
    ]
    if as_json:
        typer.echo(to_line({"aliases": listed}))
        return
    rows = [(show_name(one["name"]), one["model"], f"by {one['by']}") for one in listed]
    typer.echo("\n".join(columns(rows)) if rows else "no aliases")


def _no_alias(name: str) -> ModelNotFoundError:
    return ModelNotFoundError(f"there is no alias {name!r}{_did_you_mean(name)}")


def _row(facts: ModelFacts) -> tuple[str, ...]:
    place, found, capacity = facts.place, facts.description, facts.capacity
    size = f"{show_bytes(place.n_bytes)}{', incomplete' if place.missing else ''}"
    row = (show_name(place.name, whole=True), ", ".join(map(show_name, facts.aliases)) or "-", size)
    if found is None or capacity is None:
        return (*row, "unknown", "-", "-", "-")
    cost, agents = show_bytes(capacity.token_bytes), str(capacity.agents)
    return (*row, _forms(found), cost, agents, "yes" if capacity.fits else "no")


def _details(facts: ModelFacts) -> Iterator[str]:
    place, found = facts.place, facts.description
    rows = [("model", show_name(place.name, whole=True))]
    if facts.aliases:
        rows.append(("aliases", ", ".join(map(show_name, facts.aliases))))
    rows.append(("where", _where(place)))
    rows.append(("size", show_bytes(place.n_bytes)))
    if found is not None:
        context = found.context_tokens
        rows.append(("architecture", show_name(found.model_type)))
        rows.append(("context", "unknown" if context is None else f"{context} tokens"))
        rows.append(("caches", _forms(found)))
    yield from columns(rows)
    yield from _holds(facts)


def _where(place: Place) -> str:
    if place.folder is None:
        return f"on the hub, not fetched; commit {place.commit}"
    missing = ", incomplete: `semantic models pull` continues" if place.missing else ""
    return f"{place.source}, {place.folder}{missing}"


def _forms(found: ModelDescription) -> str:
    texts = [
        f"{form.layers} {form.kind}{f' of {form.window}' if form.window else ''}"
        for form in found.forms
    ]
    return " + ".join(texts)


def _holds(facts: ModelFacts) -> Iterator[str]:
    capacity = facts.capacity
    if capacity is None:
        yield f"the memory it needs is unknown: {facts.problem}"
        return
    fixed = f", and an agent {show_bytes(capacity.fixed_bytes)}" if capacity.fixed_bytes else ""
    yield f"a token costs {show_bytes(capacity.token_bytes)}{fixed}"
    if not capacity.fits:
        yield f"it {_too_large(capacity)}"
        return
    weights, memory = show_bytes(capacity.weights_bytes), show_bytes(capacity.memory_bytes)
    yield f"the weights take {weights} of {memory} of memory"
    pool, each = show_bytes(capacity.pool_bytes), show_bytes(capacity.agent_bytes)
    yield f"a pool of {pool} holds {capacity.agents} agents of {AGENT_TOKENS} tokens, {each} each"
    if capacity.agents_8_bits is not None:
        yield f"with --kv-bits 8 it holds {capacity.agents_8_bits}"


def _too_large(capacity: Capacity) -> str:
    return (
        f"does not fit: {show_bytes(capacity.weights_bytes)} of weights and a pool of "
        f"{show_bytes(capacity.pool_bytes)}, but only {show_bytes(capacity.memory_bytes)} of memory"
    )


def _print(as_json: bool, text: str, document: Json) -> None:
    typer.echo(to_line(document) if as_json else text)
