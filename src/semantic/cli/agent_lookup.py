"""Opens the store on disk for a command, and finds agents in it by name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.application.agents.branches import is_checkpoint
from semantic.application.agents.footprint import walk
from semantic.application.cache.agent_notes import parent_of
from semantic.cli.options import StoreOptions
from semantic.cli.report import show_name
from semantic.cli.shell.completion import complete_agents
from semantic.composition.named_models import model_name
from semantic.composition.process_stores import open_disk
from semantic.domain.block_hash import LOCAL_TENANT, Scope, tenant_id, tenant_tag
from semantic.domain.errors import InvalidRequestError, StoreError
from semantic.domain.stored import Manifest
from semantic.ports.agents import EVERY_AGENT, AgentFilter
from semantic.ports.store import AgentIndexPort

if TYPE_CHECKING:
    from semantic.adapters.stores.disk.store import DiskStore

ID_DIGITS = 12
"""The number of hexadecimal digits of a model's id in text output."""

AgentName = Annotated[
    str,
    typer.Argument(help="The agent's name.", autocompletion=complete_agents, show_default=False),
]
ModelId = Annotated[
    str | None,
    typer.Option(
        help="Select among agents with this name by model id; a prefix is enough.",
        show_default=False,
    ),
]

AsText = Annotated[
    bool, typer.Option("--text", help="Show tokens as text, which loads the tokenizer.")
]

TenantName = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="ID",
        help="The agent's tenant, as `semantic agents ls --all-tenants` lists it. Default: that of "
        "requests without a key.",
        show_default=False,
    ),
]

NamePrefix = Annotated[
    str | None,
    typer.Option(
        "--prefix", metavar="TEXT", help="Agents whose names begin with this.", show_default=False
    ),
]
ParentName = Annotated[
    str | None,
    typer.Option(
        "--parent", metavar="NAME", help="Agents forked or started by this.", show_default=False
    ),
]
IsPinned = Annotated[
    bool | None,
    typer.Option(
        "--pinned/--unpinned", help="Only pinned, or only unpinned agents.", show_default=False
    ),
]


@contextmanager
def open_store(options: StoreOptions, *, create: bool = False) -> Iterator[DiskStore]:
    """Open the store on disk for the `with` block. Raises StoreError. Also raises
    InvalidRequestError if the store's folder is missing and `create` is not set."""
    settings = options.settings()
    if settings.store is not None and not create and not os.path.lexists(settings.store):
        raise InvalidRequestError(f"there is no store {settings.store}")
    store = open_disk(settings)
    try:
        yield store
    finally:
        store.close()


def scopes_of(store: DiskStore, tenant: str | None) -> Sequence[Scope]:
    """Return the scopes of a tenant's agents, one per model. None means the local tenant. Raises
    InvalidRequestError for a tenant without agents."""
    if tenant is None:
        return store.scopes_of(tenant_tag(store.secret, LOCAL_TENANT))
    every = store.scopes()
    found = [scope for scope in every if tenant_id(store.secret, scope.tenant) == tenant]
    if not found:
        known = sorted({tenant_id(store.secret, scope.tenant) for scope in every})
        listed = f"expected one of {', '.join(known)}" if known else "the store has none"
        raise InvalidRequestError(f"there are no agents of tenant {show_name(tenant)}; {listed}")
    return found


def last_saved(
    store: DiskStore, scopes: Sequence[Scope], only: AgentFilter, limit: int
) -> tuple[list[Manifest], int]:
    """Return at most `limit` agents that `only` accepts, last saved first. Also return the number
    of all other agents that `only` accepts, or without a filter of agents and checkpoints."""
    if only != EVERY_AGENT:
        accepted = agents_where(store, scopes, only)
        return accepted[:limit], max(0, len(accepted) - limit)
    listed = (
        islice((one for one in walk(store, scope) if not is_checkpoint(one.agent_id)), limit)
        for scope in scopes
    )
    found = sorted(chain.from_iterable(listed), key=lambda one: one.place, reverse=True)[:limit]
    if len(found) < limit:
        return found, 0
    n_all = sum(store.count_of(tag) for tag in {scope.tenant for scope in scopes})
    return found, max(0, n_all - len(found))


def agents_where(
    store: DiskStore, scopes: Sequence[Scope], only: AgentFilter, model_id: str | None = None
) -> list[Manifest]:
    """Return agents that `only` accepts, last saved first. `model_id` may be the start of an id."""
    of_model = (model_id or "").lower()
    found = [
        manifest
        for scope in scopes
        for manifest in walk(store, scope)
        if shown_id(manifest, whole=True).startswith(of_model)
        and not is_checkpoint(manifest.agent_id)
        and only.accepts(manifest.agent_id, "idle", parent_of(manifest), pinned=manifest.pinned)
    ]
    return sorted(found, key=lambda one: one.place, reverse=True)


def find_agent(
    store: DiskStore, name: str, model_id: str | None, tenant: str | None = None
) -> Manifest:
    """Return a tenant's agent by name. Raises InvalidRequestError for no agent or several."""
    known = [store.manifest(scope, name) for scope in scopes_of(store, tenant)]
    named = [manifest for manifest in known if manifest is not None]
    if not named:
        owner = "" if tenant is None else f" of tenant {tenant}"
        raise InvalidRequestError(
            f"no agent {show_name(name)}{owner} in this store; `semantic agents ls` lists them"
        )
    found = [
        manifest
        for manifest in named
        if shown_id(manifest, whole=True).startswith((model_id or "").lower())
    ]
    if len(found) == 1:
        return found[0]
    problem = (
        f"exists, but {model_id!r:.80} begins the id of none" if not found else "exists for several"
    )
    raise InvalidRequestError(
        f"agent {show_name(name)} {problem} of these models: {_models(named)}; "
        "--model-id selects one by its first digits"
    )


def require_free_name(agents: AgentIndexPort, like: Manifest, name: str) -> None:
    """Raise InvalidRequestError for an empty name, a checkpoint's, or that of an agent of the same
    model."""
    if not name or is_checkpoint(name):
        raise InvalidRequestError("an agent's name must not be empty or a checkpoint's")
    if agents.manifest(like.scope, name) is not None:
        raise InvalidRequestError(f"an agent {show_name(name)} of this model exists already")


def save(agents: AgentIndexPort, manifest: Manifest) -> None:
    """Save `manifest`. Raises StoreError if the store refuses it."""
    if not agents.save(manifest):
        raise StoreError(
            f"cannot save agent {show_name(manifest.agent_id)}; "
            "`semantic cache stats` counts the errors"
        )


def shown_id(manifest: Manifest, *, whole: bool = False) -> str:
    """Return the id of the agent's model. The id is shortened unless `whole` is set."""
    digits = manifest.scope.namespace.hex()
    return digits if whole else digits[:ID_DIGITS]


def _models(manifests: Sequence[Manifest]) -> str:
    return ", ".join(f"{shown_id(one)} ({show_name(model_name(one.model))})" for one in manifests)
