"""`semantic agents rm`: forgets agents by name or by a filter, after one confirmation.

Every name is looked up before the first agent is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from semantic.cli.agent_lookup import (
    IsPinned,
    ModelId,
    NamePrefix,
    ParentName,
    TenantName,
    agents_where,
    find_agent,
    open_store,
    scopes_of,
    shown_id,
)
from semantic.cli.options import AsJson, StoreOptions
from semantic.cli.report import Json, show_name, to_line
from semantic.cli.terminal import is_interactive
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from semantic.ports.agents import EVERY_AGENT, AgentFilter

_NAMED = 10
"""Names in a question; more are counted."""


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
    """Forget agents. Their blocks are evicted when space is needed.

    More than one name, or a filter, is confirmed first. With an unknown name nothing is forgotten.
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
        removed = [disk.remove(agent.scope, agent.agent_id) for agent in found]
    typer.echo(
        _document(found, removed, one=len(unique) == 1) if as_json else _text(found, removed)
    )


def _confirm(agents: Sequence[Manifest]) -> None:
    """Ask on a terminal. Raises Abort for no, and InvalidRequestError without one."""
    shown = [show_name(agent.agent_id) for agent in agents[:_NAMED]]
    more = f" and {len(agents) - _NAMED} more" if len(agents) > _NAMED else ""
    what = f"{len(agents)} agent{'s' if len(agents) > 1 else ''}: {', '.join(shown)}{more}"
    if not is_interactive():
        raise InvalidRequestError(f"this would forget {what}; --yes confirms it")
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
