"""The parts of a request (options, tools, messages), and the first part that differs.

Parts contain only names, numbers and short digests, so they do not reveal any text.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from semantic.domain.chat import (
    Chat,
    Defaults,
    Message,
    Role,
    canonical,
    defaults_of,
    point_after,
    thought_digest,
    tool_text,
)
from semantic.domain.identity import digest

MAX_MESSAGES = 4096
"""The maximum number of messages to compare."""
_MAX_NAMED = 512
_MAX_LABEL_LENGTH = 64
_DIGEST_BYTES = 6
SHORT = 8
"""The number of characters of a digest."""
THREAD_MESSAGES = 64
_SYSTEM: frozenset[Role] = frozenset({"system", "developer"})


class PartKind(StrEnum):
    """The kind of a request's part that differs."""

    OPTION = "option"
    TOOL = "tool"
    SYSTEM = "system"
    """A leading system message."""
    MESSAGE = "message"
    THINKING = "thinking"
    """The reasoning before an answer."""
    TEMPLATE = "template"
    """The request is the same, but the template renders it as other tokens."""


class Change(StrEnum):
    CHANGED = "changed"
    ADDED = "added"
    REMOVED = "removed"
    MOVED = "moved"
    NOT_ANSWERED = "not answered"
    """An answer in the history differs from the generated answer."""
    CUT = "cut"
    """The answer in the history ends at a stop string, before the end of the generated text."""
    RENDERED = "rendered"
    """The answer's content is equal, but the template renders it as other tokens."""


class Answered(StrEnum):
    """How an answer in a request's history relates to the generated answer."""

    PLAIN = "="
    """The answer is the generated answer, which had no reasoning."""
    THOUGHT = "~"
    """The answer is the generated answer, which followed reasoning."""
    RETHOUGHT = "^"
    """The answer is the generated answer, but the request has other reasoning before it."""
    CUT = "|"
    """The answer is the generated answer, cut at a stop string."""
    OTHER = "!"
    """The answer is not known to be a generated answer."""


_RENDERED_BECAUSE = {
    Answered.THOUGHT: (PartKind.THINKING, Change.RENDERED),
    Answered.RETHOUGHT: (PartKind.THINKING, Change.CHANGED),
    Answered.CUT: (PartKind.MESSAGE, Change.CUT),
    Answered.OTHER: (PartKind.MESSAGE, Change.NOT_ANSWERED),
}
"""Reasons why the template renders an answer as other tokens than the model generated."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A part of a request that differs from an earlier request.

    `name` is the name of a tool or option, or the role of a message. Numbers count tools or
    messages from 1.
    """

    kind: PartKind
    change: Change
    number: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """A tool or an option: its name and a digest of its content."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class MessageDigest:
    """Digests of a message's content and of its reasoning ("" without reasoning)."""

    role: Role
    digest: str
    thought: str = ""
    answered: Answered = Answered.PLAIN


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a request.

    `messages` contains the first 4096 of its `n_messages` messages. The first `n_replayed` messages
    have the tokens that the model computed.
    """

    options: tuple[Named, ...] = ()
    tools: tuple[Named, ...] = ()
    messages: tuple[MessageDigest, ...] = ()
    n_messages: int = 0
    n_replayed: int = 0

    @property
    def n_system(self) -> int:
        """The number of leading system messages."""
        roles = (message.role in _SYSTEM for message in self.messages)
        return next((at for at, is_system in enumerate(roles) if not is_system), len(self.messages))

    @property
    def is_cut(self) -> bool:
        """True if the request has more messages than `messages` contains."""
        return self.n_messages > len(self.messages)


def parts_of(
    chat: Chat,
    n_replayed: int = 0,
    answers: Mapping[int, Answered] | None = None,
    tool_texts: Sequence[bytes] | None = None,
) -> Parts:
    """Return the parts of `chat`. The engine replays its first `n_replayed` messages.

    `answers` maps an answer's index to its relation to the generated answer.
    """
    options = sorted(chat.template_options.items())
    known, defaults = answers or {}, defaults_of(chat.tools)
    texts = map(tool_text, chat.tools) if tool_texts is None else tool_texts
    return Parts(
        _named((name, canonical(value)) for name, value in options),
        _named((tool.name, text) for tool, text in zip(chat.tools, texts, strict=True)),
        tuple(
            _digested(message, known.get(number, Answered.PLAIN), defaults)
            for number, message in enumerate(chat.messages[:MAX_MESSAGES])
        ),
        len(chat.messages),
        n_replayed,
    )


def changed_part(before: Parts, now: Parts) -> Difference | None:
    """Return the first part that differs; None if `now` equals or extends `before`."""
    return (
        _first_named(PartKind.OPTION, before.options, now.options)
        or _first_named(PartKind.TOOL, before.tools, now.tools)
        or _first_message(before, now)
    )


def rendered_part(before: Parts, now: Parts, *, in_answer: bool) -> Difference | None:
    """Return why the tokens differ although `now` has all parts of `before`; None if unknown."""
    if before.is_cut:
        return None
    n_prompt = before.n_messages
    if in_answer and now.n_messages > n_prompt:
        return _answer(before, now)
    prompt, new = now.messages[:n_prompt], now.messages[n_prompt:]
    thoughts = (Answered.THOUGHT, Answered.RETHOUGHT)
    has_thoughts = any(one.thought or one.answered in thoughts for one in prompt)
    # Some templates render a late system message at the beginning.
    if has_thoughts and not any(one.role in _SYSTEM for one in new):
        return Difference(PartKind.THINKING, Change.RENDERED)
    return Difference(PartKind.TEMPLATE, Change.RENDERED)


def thread_of(parts: Parts, most: int = THREAD_MESSAGES) -> str:
    """Return digests of `most` messages, which identify a conversation, whatever its system
    messages."""
    return "".join(one.digest for one in parts.messages[parts.n_system :][:most])


def common_messages(thread: str, other: str) -> int:
    """Return how many messages at the beginning of both conversations are equal."""
    ends = range(SHORT, min(len(thread), len(other)) + 1, SHORT)
    return bisect_left(ends, True, key=lambda end: thread[:end] != other[:end])


def label(name: str) -> str:
    """Return a name for display, shortened and printable."""
    return "".join(c if c.isprintable() else "?" for c in name[:_MAX_LABEL_LENGTH])


def _answer(before: Parts, now: Parts) -> Difference | None:
    at = before.n_messages
    if at >= len(now.messages):
        return None
    answer, number = now.messages[at], at - before.n_system + 1
    if answer.role != "assistant":
        return Difference(PartKind.MESSAGE, Change.REMOVED, number, "assistant")
    kind, change = _RENDERED_BECAUSE.get(answer.answered, (PartKind.TEMPLATE, Change.RENDERED))
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
    for number in range(now.n_replayed, at):
        change = _thought_change(before.messages[number].thought, now.messages[number].thought)
        if change is not None:
            return _of_message(PartKind.THINKING, change, now, number)
    if at == len(old):
        return None
    if at == len(new):
        return None if now.is_cut else _message_difference(before, at, Change.REMOVED)
    if new[at + 1 :][: len(old) - at] == old[at:]:
        return _message_difference(now, at, Change.ADDED)
    if old[at + 1 :] and new[at:][: len(old) - at - 1] == old[at + 1 :]:
        return _message_difference(before, at, Change.REMOVED)
    is_system = at < before.n_system
    return _message_difference(before if is_system else now, at, Change.CHANGED)


def _thought_change(old: str, new: str) -> Change | None:
    if old == new:
        return None
    if not new:
        return Change.REMOVED
    return Change.CHANGED if old else Change.ADDED


def _message_difference(parts: Parts, at: int, change: Change) -> Difference:
    kind = PartKind.SYSTEM if at < parts.n_system else PartKind.MESSAGE
    return _of_message(kind, change, parts, at)


def _of_message(kind: PartKind, change: Change, parts: Parts, at: int) -> Difference:
    first = 0 if kind is PartKind.SYSTEM else parts.n_system
    return Difference(kind, change, at - first + 1, parts.messages[at].role)


def _digested(message: Message, answered: Answered, defaults: Defaults) -> MessageDigest:
    thinks = message.role == "assistant" and message.reasoning.strip()
    thought = _short(thought_digest(message.reasoning)) if thinks else ""
    content = _short(point_after(b"", message, defaults))
    return MessageDigest(message.role, content, thought, answered)


def _named(parts: Iterable[tuple[str, bytes]]) -> tuple[Named, ...]:
    found = [(label(name), digest("part-v1", content)) for name, content in parts]
    first, rest = found[:_MAX_NAMED], found[_MAX_NAMED:]
    if rest:
        first.append(("", digest("parts-v1", *(one for _, one in rest))))
    return tuple(Named(name, _short(content)) for name, content in first)


def _short(content: bytes) -> str:
    return base64.urlsafe_b64encode(content[:_DIGEST_BYTES]).decode()


def _key(message: MessageDigest) -> tuple[str, str]:
    return message.role, message.digest


def _common(before: Sequence[object], now: Sequence[object]) -> int:
    pairs = enumerate(zip(before, now, strict=False))
    return next((at for at, (old, new) in pairs if old != new), min(len(before), len(now)))
