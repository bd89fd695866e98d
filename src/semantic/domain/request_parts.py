"""A request as labelled parts, and in which of them it first differs from an earlier one.

The parts stand in the order in which templates write them: options, tools, messages. They are
labels, numbers and short digests: no text comes back from them. Knows no tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from semantic.domain.chat import Chat, Message, Role
from semantic.domain.digest import digest
from semantic.domain.history import canonical, point_after, thought_digest, tool_text

MOST_MESSAGES = 4096
"""Messages that are told apart; an answer to more has no room in the contexts of today."""
_MOST_NAMED = 512
_LONGEST_LABEL = 64
_DIGEST_BYTES = 6
SHORT = 8
"""Characters of a digest; enough to tell a request from the one before it."""
THREAD_MESSAGES = 64
_SYSTEM: frozenset[Role] = frozenset({"system", "developer"})


class PartKind(StrEnum):
    """What a difference is in."""

    OPTION = "option"
    """Of the template."""
    TOOL = "tool"
    SYSTEM = "system"
    """A system message before all others."""
    MESSAGE = "message"
    THINKING = "thinking"
    """What was thought before an answer."""
    TEMPLATE = "template"
    """Nothing in the request: the template writes the same in another way."""


class Change(StrEnum):
    """What became of a part."""

    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    MOVED = "moved"
    NOT_ANSWERED = "not answered"
    """An answer that is sent back is not the one that was given, as far as is known."""
    CUT = "cut"
    """An answer ended at a stop string, before what the model wrote did."""
    RENDERED = "rendered"
    """It is the same, and the template writes it in another way."""


class Given(StrEnum):
    """What is known of an answer that a client sends back."""

    PLAIN = "="
    """Nothing to tell."""
    THOUGHT = "~"
    """It was given, after a thought."""
    RETHOUGHT = "^"
    """It was given, after another thought than the one that is sent back with it."""
    CUT = "|"
    """It was given, and ended at a stop string."""
    OTHER = "!"
    """Nothing like it was given, as far as is known."""


_UNLIKE = {
    Given.THOUGHT: (PartKind.THINKING, Change.RENDERED),
    Given.RETHOUGHT: (PartKind.THINKING, Change.CHANGED),
    Given.CUT: (PartKind.MESSAGE, Change.CUT),
    Given.OTHER: (PartKind.MESSAGE, Change.NOT_ANSWERED),
}
"""What to put it down to that an answer stands in other tokens."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A part that is not as it was.

    Tools count from 1, and so do messages behind the leading system messages. `name` is a tool's
    or an option's name, or a message's role.
    """

    kind: PartKind
    change: Change
    number: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """A tool or an option: what it is called, and a digest of all of it."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Said:
    """A message: a digest of what it says, another one of the thought before it ("" for none)."""

    role: Role
    digest: str
    thought: str = ""
    given: Given = Given.PLAIN


@dataclass(frozen=True, slots=True)
class Parts:
    """A request. Of its `n_messages` messages the first 4096 are told apart; the first `kept`
    stand in the tokens in which they were computed."""

    options: tuple[Named, ...] = ()
    tools: tuple[Named, ...] = ()
    messages: tuple[Said, ...] = ()
    n_messages: int = 0
    kept: int = 0

    @property
    def n_system(self) -> int:
        """How many system messages it begins with."""
        roles = (message.role in _SYSTEM for message in self.messages)
        return next((at for at, is_system in enumerate(roles) if not is_system), len(self.messages))

    @property
    def is_cut(self) -> bool:
        """Whether it has messages that are not told apart."""
        return self.n_messages > len(self.messages)


def parts_of(
    chat: Chat,
    kept: int = 0,
    given: Mapping[int, Given] | None = None,
    tool_texts: Sequence[bytes] | None = None,
) -> Parts:
    """The parts of `chat`, of which the first `kept` messages stand in their own tokens.

    `given` says what is known of its answers, by their numbers among all messages; `tool_texts`
    are those of `tool_text`, where they are known.
    """
    options = sorted(chat.template_options.items())
    known = given or {}
    texts = map(tool_text, chat.tools) if tool_texts is None else tool_texts
    return Parts(
        _named((name, canonical(value)) for name, value in options),
        _named((tool.name, text) for tool, text in zip(chat.tools, texts, strict=True)),
        tuple(
            _said(message, known.get(number, Given.PLAIN))
            for number, message in enumerate(chat.messages[:MOST_MESSAGES])
        ),
        len(chat.messages),
        kept,
    )


def changed_part(before: Parts, now: Parts) -> Difference | None:
    """The first part that differs; None when `now` says the same, or only more.

    A thought that is left out is no difference where the tokens it was thought in still stand.
    """
    return (
        _first_named(PartKind.OPTION, before.options, now.options)
        or _first_named(PartKind.TOOL, before.tools, now.tools)
        or _first_message(before, now)
    )


def rendered_part(before: Parts, now: Parts, *, in_answer: bool) -> Difference | None:
    """What was written in another way, though no part of `before` differs in `now`.

    `in_answer`: the tokens part in the answer to `before`, not in what it asked. None when a
    message that is not told apart may be to blame.
    """
    if before.is_cut:
        return None
    n_asked = before.n_messages
    if in_answer and now.n_messages > n_asked:
        return _answer(before, now)
    asked, new = now.messages[:n_asked], now.messages[n_asked:]
    thoughts = (Given.THOUGHT, Given.RETHOUGHT)
    has_thoughts = any(one.thought or one.given in thoughts for one in asked)
    # There are templates that write a late system message at the beginning.
    if has_thoughts and not any(one.role in _SYSTEM for one in new):
        return Difference(PartKind.THINKING, Change.RENDERED)
    return Difference(PartKind.TEMPLATE, Change.RENDERED)


def thread_of(parts: Parts) -> str:
    """What stands for a conversation whatever its system messages, tools and options are: digests
    of the first messages behind them."""
    return "".join(one.digest for one in parts.messages[parts.n_system :][:THREAD_MESSAGES])


def common_messages(thread: str, other: str) -> int:
    """How many messages two conversations begin with that are the same."""
    starts = range(0, min(len(thread), len(other)), SHORT)
    same = (thread[at : at + SHORT] == other[at : at + SHORT] for at in starts)
    return next((number for number, is_same in enumerate(same) if not is_same), len(starts))


def label(name: str) -> str:
    """A name as it may be shown: it ends somewhere, and has printable characters only."""
    return "".join(c if c.isprintable() else "?" for c in name[:_LONGEST_LABEL])


def _answer(before: Parts, now: Parts) -> Difference | None:
    """What is wrong with the answer to `before` that stands, or should, in `now`."""
    at = before.n_messages
    if at >= len(now.messages):
        return None
    answer, number = now.messages[at], at - before.n_system + 1
    if answer.role != "assistant":
        return Difference(PartKind.MESSAGE, Change.REMOVED, number, "assistant")
    kind, change = _UNLIKE.get(answer.given, (PartKind.TEMPLATE, Change.RENDERED))
    if kind is PartKind.TEMPLATE and answer.thought:
        kind = PartKind.THINKING
    if kind is PartKind.TEMPLATE:
        return Difference(kind, change)
    return Difference(kind, change, number, "assistant")


def _first_named(
    kind: PartKind, before: Sequence[Named], now: Sequence[Named]
) -> Difference | None:
    at = _common(before, now)
    number = at + 1 if kind is PartKind.TOOL else None
    old = before[at].name if at < len(before) else None
    new = now[at].name if at < len(now) else None
    if old is None and new is None:
        return None
    if old is None or (new is not None and new not in {one.name for one in before}):
        return Difference(kind, Change.ADDED, number, new)
    if new is None or old not in {one.name for one in now}:
        return Difference(kind, Change.REMOVED, number, old)
    return Difference(kind, Change.CHANGED if old == new else Change.MOVED, number, new)


def _first_message(before: Parts, now: Parts) -> Difference | None:
    old, new = [_key(one) for one in before.messages], [_key(one) for one in now.messages]
    at = _common(old, new)
    for number in range(now.kept, at):
        change = _thought_change(before.messages[number].thought, now.messages[number].thought)
        if change is not None:
            return _of_message(PartKind.THINKING, change, now, number)
    if at == len(old):
        return None
    if at == len(new):
        return None if now.is_cut else _told(before, at, Change.REMOVED)
    if new[at + 1 :][: len(old) - at] == old[at:]:
        return _told(now, at, Change.ADDED)
    if old[at + 1 :] and new[at:][: len(old) - at - 1] == old[at + 1 :]:
        return _told(before, at, Change.REMOVED)
    is_system = at < before.n_system
    return _told(before if is_system else now, at, Change.CHANGED)


def _thought_change(old: str, new: str) -> Change | None:
    if old == new:
        return None
    if not new:
        return Change.REMOVED
    return Change.CHANGED if old else Change.ADDED


def _told(parts: Parts, at: int, change: Change) -> Difference:
    """The message at `at` of `parts`."""
    kind = PartKind.SYSTEM if at < parts.n_system else PartKind.MESSAGE
    return _of_message(kind, change, parts, at)


def _of_message(kind: PartKind, change: Change, parts: Parts, at: int) -> Difference:
    first = 0 if kind is PartKind.SYSTEM else parts.n_system
    return Difference(kind, change, at - first + 1, parts.messages[at].role)


def _said(message: Message, given: Given) -> Said:
    thinks = message.role == "assistant" and message.reasoning.strip()
    thought = _short(thought_digest(message.reasoning)) if thinks else ""
    return Said(message.role, _short(point_after(b"", message)), thought, given)


def _named(parts: Iterable[tuple[str, bytes]]) -> tuple[Named, ...]:
    """All that have a name; what is more than a note has room for is one part."""
    found = [(label(name), digest("part-v1", content)) for name, content in parts]
    first, rest = found[:_MOST_NAMED], found[_MOST_NAMED:]
    if rest:
        first.append(("", digest("parts-v1", *(one for _, one in rest))))
    return tuple(Named(name, _short(content)) for name, content in first)


def _short(content: bytes) -> str:
    return base64.urlsafe_b64encode(content[:_DIGEST_BYTES]).decode()


def _key(message: Said) -> tuple[str, str]:
    return message.role, message.digest


def _common(before: Sequence[object], now: Sequence[object]) -> int:
    """How many leading ones are equal."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((at for at, (old, new) in pairs if old != new), min(len(before), len(now)))
