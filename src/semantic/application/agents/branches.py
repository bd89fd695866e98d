"""Branches: named checkpoints of agents, earlier turns, families, and differences of histories.

A checkpoint is a manifest of its own and shares the agent's blocks. Its name in the store contains
a character that no agent's name can contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from semantic.application.cache.agent_notes import note_of, origin_in, parts_in
from semantic.application.chat.transcript import messages_in, transcript_of
from semantic.domain.block_hash import Scope
from semantic.domain.errors import AgentNotFoundError, InvalidRequestError
from semantic.domain.prefix import common_prefix
from semantic.domain.request_parts import changed_part
from semantic.domain.stored import Manifest
from semantic.ports.agents import Branch, Comparison
from semantic.ports.store import AgentIndexPort

MAX_ID_LENGTH = 256
"""The maximum number of characters in the name of an agent or a checkpoint."""
_MOST_FORKS = 256
"""The maximum number of agents that one call forks."""
_LISTED = 5
"""The maximum number of names in an error."""
MOST_RELATIVES = 1000
"""The maximum number of agents in a family."""
_MARK = "\x1e"


def require_name(name: str, what: str = "agent name") -> None:
    """Raise InvalidRequestError unless `name` is valid for an agent or a checkpoint."""
    if not 1 <= len(name) <= MAX_ID_LENGTH or not name.isprintable():
        raise InvalidRequestError(
            f"{what} must have 1 to {MAX_ID_LENGTH} printable characters, got {name!r:.80}"
        )


def require_new(new_ids: Sequence[str]) -> None:
    """Raise InvalidRequestError unless `new_ids` are different names for new agents."""
    if not 1 <= len(new_ids) <= _MOST_FORKS:
        raise InvalidRequestError(f"new_ids must have 1 to {_MOST_FORKS} names, got {len(new_ids)}")
    for name in new_ids:
        require_name(name)
    if len(set(new_ids)) < len(new_ids):
        raise InvalidRequestError("new_ids must be different names")


def checkpoint_id(agent_id: str, name: str) -> str:
    """Return the name in the store of an agent's checkpoint `name`."""
    return f"{agent_id}{_MARK}{name}"


def is_checkpoint(agent_id: str) -> bool:
    """Return whether a name in the store is a checkpoint's."""
    return _MARK in agent_id


def shown_name(agent_id: str) -> str:
    """Return a checkpoint's own name."""
    return agent_id.rpartition(_MARK)[2]


# Checkpoints


def checkpoint(history: Manifest, name: str, now: float) -> Manifest:
    """Return a checkpoint of an agent's `history`. Raises InvalidRequestError for a bad name."""
    require_name(name, "name")
    agent_id = history.agent_id
    named = replace(history, agent_id=checkpoint_id(agent_id, name), parent=agent_id)
    return replace(named, generation=0, pinned=False, saved_at=now)


def names_of_checkpoints(agents: AgentIndexPort, scope: Scope, agent_id: str) -> list[str]:
    """Return the names in the store of an agent's checkpoints."""
    return list(filter(is_checkpoint, agents.child_agents(scope, agent_id)))


def checkpoints(agents: AgentIndexPort, scope: Scope, agent_id: str) -> list[Manifest]:
    """Return an agent's checkpoints, oldest first."""
    names = names_of_checkpoints(agents, scope, agent_id)
    found = (agents.manifest(scope, name) for name in names)
    return sorted((one for one in found if one is not None), key=lambda one: one.place)


def find_checkpoint(agents: AgentIndexPort, scope: Scope, agent_id: str, name: str) -> Manifest:
    """Return an agent's checkpoint by name, or raise AgentNotFoundError."""
    found = agents.manifest(scope, checkpoint_id(agent_id, name))
    if found is None:
        names = names_of_checkpoints(agents, scope, agent_id)[:_LISTED]
        known = ", ".join(repr(shown_name(one)) for one in names) or "none"
        raise AgentNotFoundError(
            f"agent {agent_id!r:.80} has no checkpoint {name!r:.80}; it has {known}"
        )
    return found


def history_at(
    agents: AgentIndexPort, scope: Scope, branch: Branch, latest: Callable[[], Manifest]
) -> Manifest:
    """Return the history at which `branch` begins, under its agent's name. `latest` returns the
    agent. Raises AgentNotFoundError, and InvalidRequestError for a turn that the history lacks."""
    if branch.checkpoint is None:
        return as_of(latest(), branch.turn)
    saved = find_checkpoint(agents, scope, branch.agent_id, branch.checkpoint)
    return as_of(replace(saved, agent_id=branch.agent_id), branch.turn)


def remove_checkpoints(agents: AgentIndexPort, scope: Scope, agent_id: str) -> None:
    """Remove all checkpoints of an agent."""
    for name in names_of_checkpoints(agents, scope, agent_id):
        agents.remove(scope, name)


def continued(saved: Manifest, agent_id: str, before: Manifest | None) -> Manifest:
    """Return the checkpoint `saved` as its agent's history, which had the manifest `before`."""
    parent, pinned = (None, False) if before is None else (before.parent, before.pinned)
    return replace(saved, agent_id=agent_id, parent=parent, pinned=pinned, generation=0)


def as_of(agent: Manifest, turn: int | None) -> Manifest:
    """Return `agent` at the end of one of the turns in its history, counted from 1. None means the
    last one. Raises InvalidRequestError for another number."""
    ends = agent.turn_ends
    if turn is None or turn == len(ends):
        return agent
    if not 1 <= turn <= len(ends):
        raise InvalidRequestError(
            f"turn must be 1 to {len(ends)}, the turns in the agent's history, got {turn}"
        )
    end = ends[turn - 1]
    return replace(
        agent,
        token_ids=agent.token_ids[: end.tokens],
        prompt_tokens=end.prompt_tokens,
        earlier=ends[: turn - 1],
        note=_note_before(agent.note, len(ends) - turn),
        match=None,
    )


def _note_before(note: str, n_answers: int) -> str:
    """Return `note` without the last `n_answers` answers before the current one."""
    origin, messages = origin_in(note), messages_in(note) or ()
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    asked = messages[: answers[-n_answers]] if len(answers) >= n_answers else ()
    return note_of(
        "" if origin is None else origin.note(), None, transcript_of(asked) if asked else ""
    )


# Families


def family(children: Callable[[str], Sequence[str]], agent_id: str) -> Iterator[tuple[str, int]]:
    """Yield an agent and its descendants, each after its parent, with the distance from the first.
    `children` returns the children of an agent. Yields at most `MOST_RELATIVES` agents."""
    waiting, seen = [(agent_id, 0)], {agent_id}
    while waiting and len(seen) <= MOST_RELATIVES:
        name, depth = waiting.pop()
        yield name, depth
        new = [one for one in children(name) if one not in seen]
        seen.update(new)
        waiting += ((one, depth + 1) for one in reversed(new))


# Differences


def compare(one: Manifest, other: Manifest) -> Comparison:
    """Return how the history of `other` differs from that of `one`."""
    common = common_prefix(one.token_ids, other.token_ids)
    histories = one.token_ids, other.token_ids
    expected, got = (ids[common] if common < len(ids) else None for ids in histories)
    chains = (agent.scope.chain(agent.token_ids) for agent in (one, other))
    shared = sum(mine.hash == theirs.hash for mine, theirs in zip(*chains, strict=False))
    before, now = parts_in(one.note), parts_in(other.note)
    part = None if before is None or now is None else changed_part(before, now)
    n_tokens, n_others = map(len, histories)
    return Comparison(
        one.agent_id, other.agent_id, n_tokens, n_others, common, shared, expected, got, part
    )
