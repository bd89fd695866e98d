"""The agents of sessions: which of them a request is of, when its client says whose it is.

A session's id says who asks, not what: a client asks for a title under the id of the conversation.
So a request is of the agent whose last prompt it shares at least half with, or with which it shares
what was said, and else of a new one beside it. Knows prompts by their marks; no engine, no store
and no text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from semantic.application.agents.origin import Origin
from semantic.application.agents.prompt_digests import Marks, marked, marks_of
from semantic.domain.request_parts import SHORT, common_messages

_MOST_SIBLINGS = 64
"""Agents of one identity that are looked at: each takes a while, and a user may have thousands."""
_WITH_TOOLS = frozenset({"claude-code", "codex", "opencode"})
"""Their conversations have tools: what comes first without any is a title, not the conversation."""

_MESSAGES_OF_A_TALK = 2

_Group = tuple[bytes, str]
"""A tenant's tag, and what the identity's first agent is called."""


@dataclass(frozen=True, slots=True)
class _Member:
    """An agent of a group: where its requests come from, the last one's prompt, and what was said
    in it."""

    origin: Origin
    prompt: Marks
    thread: str


@dataclass(slots=True)
class _Agents:
    """A group: its agents by name, the last used last. Numbers up to `dropped` are not given."""

    members: OrderedDict[str, _Member] = field(default_factory=OrderedDict)
    dropped: int = 0


class SessionAgents:
    """Finds the agents of sessions. Not locked: one thread makes all calls."""

    def __init__(self, most_agents: int, most_siblings: int = _MOST_SIBLINGS) -> None:
        self._most_agents = most_agents
        self._most_siblings = most_siblings
        self._groups: dict[_Group, _Agents] = {}
        self._used: OrderedDict[tuple[bytes, str], _Group] = OrderedDict()  # the last used last

    def __len__(self) -> int:
        return len(self._used)

    def find(
        self,
        tag: bytes,
        origin: Origin,
        tokens: Sequence[int],
        busy: Container[str],
        is_known: Callable[[str], bool],
        thread: str = "",
    ) -> str:
        """The agent that asks with a prompt of `tokens`, or a new one's name.

        Of those that are not `busy` and whose last prompt has half of the shorter one in common
        with it: the one with most, of several that which it goes on from, then the last used. If
        there is none, the one that was told most of `thread`: its system message or its tools
        changed.
        """
        group = self._groups.get((tag, origin.identity.name), _Agents())
        lengths = {member.prompt.n_tokens for member in group.members.values()}
        prompt, beginnings = marked(tokens, lengths)
        best, best_rank = None, (False, 0, False)
        for name, member in list(group.members.items()):
            if name in busy or member.origin.kind != origin.kind:
                continue
            common, goes_on = _rank(member.prompt, prompt, beginnings)
            if 2 * common >= min(member.prompt.n_tokens, prompt.n_tokens):
                rank = True, common, goes_on
            elif n_said := _same_thread(member, thread):
                rank = False, n_said, goes_on
            else:
                continue
            if rank < best_rank:
                continue
            if is_known(name):
                best, best_rank = name, rank
            else:
                self.forget(tag, name)
        return best or _new_name(origin, group, busy)

    def remember(
        self,
        tag: bytes,
        name: str,
        origin: Origin | None,
        tokens: Sequence[int],
        thread: str = "",
    ) -> bool:
        """That the prompt of the agent `name` was `tokens`, if it is one of an identity.

        Without an `origin` it is the one that it had before. `thread` is what was said in it.
        """
        known = self.origin(tag, name)
        if known is not None and (origin is None or origin.identity.name != known.identity.name):
            origin = known
        if origin is None or origin.identity.number(name) is None:
            return False
        group = tag, origin.identity.name
        agents = self._groups.setdefault(group, _Agents())
        agents.members[name] = _Member(origin, marks_of(tokens), thread)
        agents.members.move_to_end(name)
        self._used[tag, name] = group
        self._used.move_to_end((tag, name))
        if len(agents.members) > self._most_siblings:
            self._drop(tag, next(iter(agents.members)))
        if len(self._used) > self._most_agents:
            self._drop(*next(iter(self._used)))
        return True

    def origin(self, tag: bytes, name: str) -> Origin | None:
        """Where the requests of the agent `name` come from; None for one that is not known."""
        group = self._used.get((tag, name))
        return None if group is None else self._groups[group].members[name].origin

    def forget(self, tag: bytes, name: str) -> None:
        """Find the agent no more; its name may be given again."""
        self._take_out(tag, name)

    def _drop(self, tag: bytes, name: str) -> None:
        """Find the agent no more; it is still there, so its name is not given again."""
        group = self._used[tag, name]
        agents = self._groups[group]
        number = agents.members[name].origin.identity.number(name) or 0
        agents.dropped = max(agents.dropped, number)
        self._take_out(tag, name)

    def _take_out(self, tag: bytes, name: str) -> None:
        group = self._used.pop((tag, name), None)
        if group is None:
            return
        del self._groups[group].members[name]
        if not self._groups[group].members:
            del self._groups[group]


def _rank(before: Marks, prompt: Marks, beginnings: Mapping[int, bytes]) -> tuple[int, bool]:
    """How much two prompts have in common, and whether the later one goes on from all before."""
    goes_on = beginnings.get(before.n_tokens) == before.whole
    return before.common(prompt), goes_on


def _same_thread(member: _Member, thread: str) -> int:
    """How many messages a request has in common with what was said to `member`: half of the
    shorter one at least, else 0.

    A question alone is also asked for a title; an answer to it is not. Where there are tools, what
    was said is no title.
    """
    common = common_messages(member.thread, thread)
    known = len(member.thread) // SHORT
    if not common or 2 * common * SHORT < min(len(member.thread), len(thread)):
        return 0
    is_talk = common >= _MESSAGES_OF_A_TALK or (member.origin.has_tools and common == known)
    return common if is_talk else 0


def _new_name(origin: Origin, group: _Agents, busy: Container[str]) -> str:
    """The first name that nobody has."""
    identity = origin.identity
    no_tools = identity.client in _WITH_TOOLS and not origin.has_tools
    number = max(group.dropped, 1 if no_tools else 0) + 1
    while (name := identity.numbered(number)) in group.members or name in busy:
        number += 1
    return name
