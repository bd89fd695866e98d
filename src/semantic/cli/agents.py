"""`semantic agents`: the agents in the store on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.application.agents.branches import history_at, remove_checkpoints
from semantic.application.agents.footprint import AgentFootprint, footprints
from semantic.application.cache.agent_notes import parent_of, session_and_client_in
from semantic.cli.agent_lookup import (
    AgentName,
    IsPinned,
    ModelId,
    NamePrefix,
    ParentName,
    TenantName,
    agents_where,
    find_agent,
    last_saved,
    open_store,
    require_free_name,
    save,
    scopes_of,
    shown_id,
)
from semantic.cli.branch_commands import BRANCH_COMMANDS, AtTurn, with_descendants
from semantic.cli.options import AsJson, StoreOptions
from semantic.cli.report import (
    Json,
    columns,
    fitted,
    match_json,
    print_result,
    show_age,
    show_bytes,
    show_name,
    terminal_width,
    to_line,
)
from semantic.cli.terminal import is_interactive
from semantic.cli.why import why
from semantic.composition.named_models import model_name
from semantic.domain.block_hash import tenant_id
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from semantic.ports.agents import EVERY_AGENT, AgentFilter, Branch

if TYPE_CHECKING:
    from semantic.adapters.stores.disk.store import DiskStore

_NAMED = 10
"""The maximum number of names in a question to the user."""


def rm(
    store: StoreOptions,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="The agents' names.", show_default=False),
    ] = None,
    prefix: NamePrefix = None,
    parent: ParentName = None,
    pinned: IsPinned = None,
    model_id: ModelId = None,
    tenant: TenantName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget agents and their checkpoints. The store evicts their blocks when it needs space.

    Asks first for more than one name, or a filter. Forgets nothing if a name is unknown.
    """
    only = AgentFilter(prefix=prefix, pinned=pinned, parent=parent)
    if bool(names) == (only != EVERY_AGENT):
        raise InvalidRequestError(
            "expected either names of agents, or --prefix, --parent or --pinned/--unpinned"
        )
    unique = list(dict.fromkeys(names or ()))
    with open_store(store) as disk:
        if unique:
            found = [find_agent(disk, name, model_id, tenant) for name in unique]
        else:
            found = agents_where(disk, scopes_of(disk, tenant), only, model_id)
        if len(unique) != 1 and found and not yes:
            _confirm(found)
        removed = [_forget(disk, agent) for agent in found]
    typer.echo(
        _document(found, removed, one=len(unique) == 1) if as_json else _text(found, removed)
    )


def done(
    store: StoreOptions,
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="The agents' names.", show_default=False)
    ],
    model_id: ModelId = None,
    tenant: TenantName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget families: agents with their descendants and checkpoints.

    Asks first for more than one agent.
    """
    with open_store(store) as disk:
        roots = [find_agent(disk, name, model_id, tenant) for name in dict.fromkeys(names)]
        found = with_descendants(disk, roots)
        if len(found) > 1 and not yes:
            _confirm(found)
        removed = [_forget(disk, agent) for agent in found]
    typer.echo(_document(found, removed, one=False) if as_json else _text(found, removed))


def _forget(store: DiskStore, agent: Manifest) -> bool:
    remove_checkpoints(store, agent.scope, agent.agent_id)
    return store.remove(agent.scope, agent.agent_id)


def _confirm(agents: Sequence[Manifest]) -> None:
    shown = [show_name(agent.agent_id) for agent in agents[:_NAMED]]
    more = f" and {len(agents) - _NAMED} more" if len(agents) > _NAMED else ""
    what = f"{len(agents)} agent{'s' if len(agents) > 1 else ''}: {', '.join(shown)}{more}"
    if not is_interactive():
        raise InvalidRequestError(f"cannot ask whether to forget {what}: no terminal; add --yes")
    typer.confirm(f"Forget {what}?", abort=True, err=True)


def _text(agents: Sequence[Manifest], removed: Sequence[bool]) -> str:
    lines = [
        f"{show_name(agent.agent_id)} is {'forgotten' if done else 'gone already'}"
        for agent, done in zip(agents, removed, strict=True)
    ]
    return "\n".join(lines) or "no agents"


def _document(agents: Sequence[Manifest], removed: Sequence[bool], *, one: bool) -> str:
    found: list[Json] = [
        {"name": agent.agent_id, "model_id": shown_id(agent, whole=True), "removed": done}
        for agent, done in zip(agents, removed, strict=True)
    ]
    if one:
        return to_line({name: found[0][name] for name in ("name", "removed")})
    return to_line({"agents": found})


_LISTED = 200
"""The default maximum number of agents in a list."""
_HEADINGS = (
    "name", "tokens", "saved", "blocks", "on disk", "turns", "pinned", "shared", "parent", "client",
    "session", "model", "model id",
)  # fmt: skip


def ls(
    store: StoreOptions,
    limit: Annotated[
        int, typer.Option(min=1, help="List at most this many agents, last saved first.")
    ] = _LISTED,
    tenant: TenantName = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="List the agents of all API keys too.")
    ] = False,
    prefix: NamePrefix = None,
    parent: ParentName = None,
    pinned: IsPinned = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Show all columns, as to a file or a pipe.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the agents in the store, last saved first.

    A terminal shows the first columns, as many as fit.
    """
    only = AgentFilter(prefix=prefix, pinned=pinned, parent=parent)
    if all_tenants and tenant is not None:
        raise InvalidRequestError("expected either --tenant or --all-tenants")
    with open_store(store) as disk:
        scopes = disk.scopes() if all_tenants else scopes_of(disk, tenant)
        agents, more = last_saved(disk, scopes, only, limit)
        listed = footprints(disk, agents)
        tags = {scope.tenant: tenant_id(disk.secret, scope.tenant) for scope in scopes}
        n_all = sum(tier.n_agents for tier in disk.stats())
        n_own = sum(disk.count_of(tag) for tag in tags)
    others = n_all - n_own
    owners = [tags[facts.manifest.scope.tenant] for facts in listed] if all_tenants else []
    if as_json:
        found = [agent_json(facts) for facts in listed]
        for one, owner in zip(found, owners, strict=False):
            one["tenant"] = owner
        document: Json = {"agents": found, "other_tenants": others}
        typer.echo(to_line({**document, "more": more} if more else document))
        return
    if not listed:
        typer.echo("no agents")
    else:
        rows = [_HEADINGS, *map(_row, listed)]
        if all_tenants:
            owned = zip(("tenant", *owners), rows, strict=True)
            rows = [(name, owner, *row) for owner, (name, *row) in owned]
        typer.echo("\n".join(fitted(rows, None if wide else terminal_width())))
    if more:
        typer.echo(f"and {more} saved before; --limit lists more")
    if others:
        typer.echo(f"and {others} of other tenants; --all-tenants lists them")


def show(
    store: StoreOptions,
    name: AgentName,
    model_id: ModelId = None,
    tenant: TenantName = None,
    as_json: AsJson = False,
) -> None:
    """Show an agent and which of its blocks the store has."""
    with open_store(store) as disk:
        (facts,) = footprints(disk, [find_agent(disk, name, model_id, tenant)])
    typer.echo(to_line(detailed_json(facts)) if as_json else "\n".join(_details(facts)))


def fork(
    store: StoreOptions,
    name: AgentName,
    new_names: Annotated[
        list[str],
        typer.Argument(metavar="NEW...", help="The new agents' names.", show_default=False),
    ],
    checkpoint: Annotated[
        str | None, typer.Option("--at", metavar="CHECKPOINT", help="Begin at a checkpoint.")
    ] = None,
    turn: AtTurn = None,
    model_id: ModelId = None,
    as_json: AsJson = False,
) -> None:
    """Create new agents with the tokens of another, copying no block."""
    if len(set(new_names)) < len(new_names):
        raise InvalidRequestError("the new agents' names must differ")
    with open_store(store) as disk:
        agent = find_agent(disk, name, model_id)
        parent = history_at(disk, agent.scope, Branch(name, checkpoint, turn), lambda: agent)
        for new_name in new_names:
            require_free_name(disk, parent, new_name)
        for new_name in new_names:
            new = parent.forked(new_name)
            save(disk, replace(new, match=None, saved_at=time.time()))
    tokens = len(parent.token_ids)
    found: list[Json] = [{"name": one, "parent": name, "tokens": tokens} for one in new_names]
    listed = ", ".join(map(show_name, new_names))
    text = f"{listed} begin{'s' * (len(found) == 1)} with the {tokens} tokens of {show_name(name)}"
    print_result(as_json, text, found[0] if len(found) == 1 else {"agents": found})


def pin(
    store: StoreOptions,
    name: AgentName,
    off: Annotated[bool, typer.Option("--off", help="Allow eviction again.")] = False,
    model_id: ModelId = None,
    tenant: TenantName = None,
    as_json: AsJson = False,
) -> None:
    """Exempt an agent's blocks from eviction."""
    with open_store(store) as disk:
        agent = find_agent(disk, name, model_id, tenant)
        if agent.pinned == off:
            save(disk, replace(agent, pinned=not off))
    text = f"{show_name(name)} is {'no longer' if off else 'now'} pinned"
    print_result(as_json, text, {"name": name, "pinned": not off})


AGENT_COMMANDS: dict[str, Callable[..., None]] = {
    "ls": ls,
    "show": show,
    "fork": fork,
    "pin": pin,
    "rm": rm,
    "done": done,
    "why": why,
    **BRANCH_COMMANDS,
}


def agent_json(facts: AgentFootprint) -> Json:
    """Return the fields of an agent for a list of agents."""
    manifest = facts.manifest
    session, client = session_and_client_in(manifest.note)
    return {
        "name": manifest.agent_id,
        "model": manifest.model,
        "model_id": shown_id(manifest, whole=True),
        "tokens": len(manifest.token_ids),
        "blocks": len(facts.chain),
        "stored_blocks": facts.stored_blocks,
        "bytes": facts.n_bytes,
        "shared_bytes": facts.shared_bytes,
        "pinned": manifest.pinned,
        "turns": manifest.turns,
        "parent": parent_of(manifest),
        "session": session,
        "client": client,
        "saved_at": manifest.saved_at,
    }


def detailed_json(facts: AgentFootprint) -> Json:
    """Return all fields of an agent except its tokens."""
    manifest = facts.manifest
    return {
        **agent_json(facts),
        "prompt_tokens": manifest.prompt_tokens,
        "note": manifest.note,
        "match": match_json(manifest.match),
        "chain": [
            {
                "start": link.start,
                "stop": link.stop,
                "hash": link.hash.hex(),
                "parts": {part.value: n_bytes for part, n_bytes in facts.parts(link).items()},
            }
            for link in facts.chain
        ],
    }


def _row(facts: AgentFootprint) -> Sequence[str]:
    manifest = facts.manifest
    blocks, stored = len(facts.chain), facts.stored_blocks
    session, client = session_and_client_in(manifest.note)
    return (
        show_name(manifest.agent_id),
        str(len(manifest.token_ids)),
        show_age(manifest.saved_at),
        str(blocks) if stored == blocks else f"{stored} of {blocks}",
        show_bytes(facts.n_bytes),
        str(manifest.turns),
        "yes" if manifest.pinned else "no",
        show_bytes(facts.shared_bytes),
        *(show_name(one) if one else "-" for one in (parent_of(manifest), client, session)),
        show_name(model_name(manifest.model)),
        shown_id(manifest),
    )


def _details(facts: AgentFootprint) -> Iterator[str]:
    manifest = facts.manifest
    row = zip(_HEADINGS, _row(facts), strict=True)
    yield from columns([(heading, value) for heading, value in row])
    yield f"last prompt  {manifest.prompt_tokens} tokens; `semantic agents why` says what it cost"
    for link in facts.chain:
        parts = facts.parts(link)
        sizes = ", ".join(f"{part} {show_bytes(n)}" for part, n in parts.items())
        yield f"  {link.start:>8} to {link.stop:<8} {link.hash.hex()[:16]}  {sizes or 'missing'}"
