"""`semantic cache janitor` and `forget-tenant`, which maintain a fleet's object store."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from semantic.cli.options import AsJson, FleetOptions, RemoteGb, gib
from semantic.cli.progress import work_bar
from semantic.cli.report import to_line
from semantic.cli.terminal import is_interactive
from semantic.domain.block_hash import LOCAL_TENANT
from semantic.domain.errors import InvalidRequestError, StoreError
from semantic_fleet.fleet_store import evict_remote, forget_tenant


def janitor(fleet: FleetOptions, remote_gb: RemoteGb = None, as_json: AsJson = False) -> None:
    """Evict the least recently used objects from --remote-store, down to --remote-gb, once.

    A server with --remote-gb does this by itself. While a server holds the lease, this command does
    nothing.
    """
    budget = gib("--remote-gb", remote_gb)
    with work_bar("evicting objects"):
        report = evict_remote(fleet.settings(budget), notify=partial(typer.echo, err=True))
    if report is None:
        raise StoreError("another process is the janitor of this object store")
    typer.echo(to_line(asdict(report)) if as_json else str(report))


def forget(
    fleet: FleetOptions,
    key_variable: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable with the tenant's API key.",
            show_default=False,
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="The tenant without an API key.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete all of a tenant's objects in --remote-store and their keys.

    Remove the API key from all servers first. The servers' own disks keep their copies.
    """
    name = _tenant(key_variable, local=local)
    if not yes:
        if not is_interactive():
            raise InvalidRequestError("this would delete all of the tenant's data; add --yes")
        typer.confirm("Delete all stored objects of the tenant?", abort=True, err=True)
    done = forget_tenant(fleet.settings(), name)
    if as_json:
        keys = {"keys": done.had_keys, "keeps_versions": done.keeps_versions}
        typer.echo(to_line({"deleted": done.n_objects, **keys}))
        return
    had = done.n_objects or done.had_keys
    text = f"deleted {done.n_objects} objects and the tenant's keys"
    typer.echo(text if had else "the object store has no objects of this tenant under this secret")
    if done.keeps_versions:
        typer.echo("the bucket still has old, readable versions of these objects: delete them")


FLEET_COMMANDS: dict[str, Callable[..., None]] = {"janitor": janitor, "forget-tenant": forget}


def _tenant(key_variable: str | None, *, local: bool) -> str:
    if local == (key_variable is not None):
        raise InvalidRequestError("expected exactly one of --key-variable and --local")
    if key_variable is None:
        return LOCAL_TENANT
    key = os.environ.get(key_variable)
    if not key:
        raise InvalidRequestError(f"--key-variable: ${key_variable} has no key")
    from semantic_server.http.identity import tenant_name

    return tenant_name(key)
