"""`semantic agents checkpoint`, `restore`, `tree` and `diff`: branches of agents in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from semantic.application.agents import branches
from semantic.application.cache.agent_notes import parent_of, part_words
from semantic.cli.agent_lookup import (
    AgentName,
    AsText,
    ModelId,
    TenantName,
    agents_where,
    find_agent,
    open_store,
    save,
    scopes_of,
)
from semantic.cli.options import AsJson, StoreOptions
from semantic.cli.report import Json, columns, print_result, show_age, show_name, to_line
from semantic.composition.named_models import load_tokenizer
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from semantic.ports.agents import EVERY_AGENT

if TYPE_CHECKING:
    from semantic.adapters.stores.disk.store import DiskStore

AtTurn = Annotated[
    int | None,
    typer.Option("--turn", metavar="N", help="A turn of the history, from 1.", show_default=False),
]


def with_descendants(store: DiskStore, agents: Sequence[Manifest]) -> list[Manifest]:
    """Return agents and their descendants, each once."""
    related = (one for agent in agents for one, _ in _related(store, agent))
    found = {
        (one.scope, one.agent_id): one
        for one in related
        if not branches.is_checkpoint(one.agent_id)
    }
    return list(found.values())


def checkpoint(
    store: StoreOptions,
    name: AgentName,
    checkpoint: Annotated[
        str | None, typer.Argument(help="The checkpoint's name.", show_default=False)
    ] = None,
    turn: AtTurn = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the checkpoint.")] = False,
    model_id: ModelId = None,
    as_json: AsJson = False,
) -> None:
    """Name an agent's history, to restore or fork it later, copying no block.

    Without CHECKPOINT, list the agent's checkpoints and turns.
    """
    if checkpoint is None and (delete or turn is not None):
        raise InvalidRequestError("expected the name of a CHECKPOINT")
    with open_store(store) as disk:
        agent = find_agent(disk, name, model_id)
        if checkpoint is None:
            found = branches.checkpoints(disk, agent.scope, name)
            typer.echo(to_line(_listed(agent, found)) if as_json else _text(agent, found))
            return
        if delete:
            gone = branches.find_checkpoint(disk, agent.scope, name, checkpoint)
            disk.remove(gone.scope, gone.agent_id)
        else:
            if disk.manifest(agent.scope, branches.checkpoint_id(name, checkpoint)) is not None:
                raise InvalidRequestError(
                    f"{show_name(name)} has a checkpoint {show_name(checkpoint)} already"
                )
            agent = branches.as_of(agent, turn)
            save(disk, branches.checkpoint(agent, checkpoint, time.time()))
    tokens = len(agent.token_ids)
    mark = f"checkpoint {show_name(checkpoint)}"
    text = f"{mark} has the {tokens} tokens of {show_name(name)}"
    facts: Json = {"name": checkpoint, "agent": name}
    facts |= {"deleted": True} if delete else {"tokens": tokens}
    print_result(as_json, f"deleted {mark}" if delete else text, facts)


def restore(
    store: StoreOptions,
    name: AgentName,
    checkpoint: Annotated[str, typer.Argument(help="The checkpoint's name.", show_default=False)],
    model_id: ModelId = None,
    as_json: AsJson = False,
) -> None:
    """Give an agent the history of its checkpoint, without the later turns."""
    with open_store(store) as disk:
        agent = find_agent(disk, name, model_id)
        saved = branches.find_checkpoint(disk, agent.scope, name, checkpoint)
        save(disk, replace(branches.continued(saved, name, agent), saved_at=time.time()))
    tokens = len(saved.token_ids)
    text = f"{show_name(name)} is back at {show_name(checkpoint)}, with {tokens} tokens"
    print_result(as_json, text, {"name": name, "checkpoint": checkpoint, "tokens": tokens})


def tree(
    store: StoreOptions,
    name: Annotated[
        str | None, typer.Argument(help="Only this agent's family.", show_default=False)
    ] = None,
    model_id: ModelId = None,
    tenant: TenantName = None,
    as_json: AsJson = False,
) -> None:
    """Show agents below the agents that forked or started them, and their checkpoints."""
    with open_store(store) as disk:
        if name is None:
            known = agents_where(disk, scopes_of(disk, tenant), EVERY_AGENT, model_id)
            names = {(one.scope, one.agent_id) for one in known}
            roots = [one for one in known if (one.scope, parent_of(one)) not in names]
        else:
            roots = [find_agent(disk, name, model_id, tenant)]
        rows = [row for root in roots for row in _related(disk, root)]
    if as_json:
        listed: list[Json] = [
            {
                "name": branches.shown_name(one.agent_id),
                "parent": parent_of(one),
                "depth": depth,
                "checkpoint": branches.is_checkpoint(one.agent_id),
                "tokens": len(one.token_ids),
                "turns": one.turns,
            }
            for one, depth in rows
        ]
        typer.echo(to_line({"agents": listed}))
    else:
        typer.echo("\n".join(columns(list(map(_branch, rows)))) if rows else "no agents")


def diff(
    store: StoreOptions,
    name: AgentName,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The other agent's name.", show_default=False)
    ],
    text: AsText = False,
    model_id: ModelId = None,
    as_json: AsJson = False,
) -> None:
    """Show where the history of OTHER leaves that of an agent, and why."""
    with open_store(store) as disk:
        one, two = (find_agent(disk, each, model_id) for each in (name, other))
    found = branches.compare(one, two)
    tokenizer = load_tokenizer(one.model) if text else None
    ends = [
        None if token is None or tokenizer is None else tokenizer.decode([token])
        for token in (found.expected, found.got)
    ]
    part = None if found.part is None else part_words(found.part)
    facts: Json = {
        "name": name,
        "other": other,
        "tokens": found.tokens,
        "other_tokens": found.other_tokens,
        "common_tokens": found.common_tokens,
        "shared_blocks": found.shared_blocks,
        "token": found.expected,
        "other_token": found.got,
        "text": ends[0],
        "other_text": ends[1],
        "part": part,
    }
    lines = [
        f"both begin with {found.common_tokens} tokens and share {found.shared_blocks} blocks",
        f"{show_name(name)} has {found.tokens} tokens{_then(found.expected, ends[0])}",
        f"{show_name(other)} has {found.other_tokens} tokens{_then(found.got, ends[1])}",
        *([] if part is None else [f"in their prompts, {part}"]),
    ]
    print_result(as_json, "\n".join(lines), facts)


BRANCH_COMMANDS: dict[str, Callable[..., None]] = {
    "checkpoint": checkpoint,
    "restore": restore,
    "tree": tree,
    "diff": diff,
}


def _listed(agent: Manifest, found: Sequence[Manifest]) -> Json:
    saved: list[Json] = [
        {
            "name": branches.shown_name(one.agent_id),
            "tokens": len(one.token_ids),
            "turns": one.turns,
            "saved_at": one.saved_at,
        }
        for one in found
    ]
    turns: list[Json] = [
        {"turn": turn, "tokens": end.tokens} for turn, end in enumerate(agent.turn_ends, 1)
    ]
    return {"agent": agent.agent_id, "checkpoints": saved, "turns": turns}


def _text(agent: Manifest, found: Sequence[Manifest]) -> str:
    rows = [("checkpoint", "tokens", "saved")] if found else []
    rows += [
        (
            show_name(branches.shown_name(one.agent_id)),
            str(len(one.token_ids)),
            show_age(one.saved_at),
        )
        for one in found
    ]
    ends = ", ".join(str(end.tokens) for end in agent.turn_ends)
    return "\n".join([*columns(rows), f"turns end after {ends} tokens"])


def _related(store: DiskStore, root: Manifest) -> Iterator[tuple[Manifest, int]]:
    def children(name: str) -> Sequence[str]:
        return store.child_agents(root.scope, name)

    for name, depth in branches.family(children, root.agent_id):
        found = store.manifest(root.scope, name)
        if found is not None:
            yield found, depth


def _branch(row: tuple[Manifest, int]) -> Sequence[str]:
    one, depth = row
    mark = "@" if branches.is_checkpoint(one.agent_id) else ""
    name = f"{'  ' * depth}{mark}{show_name(branches.shown_name(one.agent_id))}"
    return name, f"{len(one.token_ids)} tokens", show_age(one.saved_at)


def _then(token: int | None, text: str | None) -> str:
    if token is None:
        return ", and ends there"
    return f", next token {token}" if text is None else f", next {text!r}"
