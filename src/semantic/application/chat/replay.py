"""Verbatim replay: a known conversation continues with its earlier computed tokens.

A template may render an answer as other tokens than the model generated. Replay therefore lets the
template render only new messages, and takes earlier messages from recorded turns.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens
from semantic.domain.chat import (
    Chat,
    Defaults,
    Message,
    Point,
    Tool,
    Turn,
    agrees,
    answers,
    defaults_of,
    point_after,
    points,
    thought_digest,
    tool_text,
)
from semantic.domain.fair_share import FairLru
from semantic.domain.identity import digest, turns_owner
from semantic.domain.request_parts import Answered
from semantic.ports.chat import ChatFormat, RenderedChat
from semantic.ports.store import TurnsPort

_MAX_BYTES = 8 << 20
"""The maximum size in bytes of the cached JSON of tools."""


class ToolSpellings:
    """A cache of tools' first spellings. Clients send the same tools with keys in another order.
    Thread-safe."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._tools: FairLru[bytes, Tool] = FairLru(max_bytes)
        self._lock = threading.Lock()

    def first(
        self, tools: Sequence[Tool], texts: Sequence[bytes], scope: bytes, *, keep: bool = True
    ) -> tuple[Tool, ...]:
        """Return `tools` in order, each in its first spelling in `scope`. Records spellings only if
        `keep` is true."""
        found: list[Tool] = []
        with self._lock:
            for tool, text in zip(tools, texts, strict=True):
                key = digest("tool-v1", text)
                known = self._tools.get(scope, key)
                if known is None and keep:
                    self._tools.put(scope, key, tool, len(text))
                found.append(known or tool)
        return tuple(found)


_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rendered conversation, and the turn that it continues."""

    rendered: RenderedChat
    point: Point
    parent: bytes | None = None
    start: int = 0
    n_replayed: int = 0
    answers: Mapping[int, Answered] = field(default_factory=dict)
    tool_texts: Sequence[bytes] | None = None
    owner: bytes = b""
    defaults: Defaults = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Known:
    # Without a final end token

    tokens: list[int]
    digest: bytes


class Replay:
    """Renders conversations of one model. Thread-safe."""

    def __init__(
        self,
        chat_format: ChatFormat,
        turns: TurnsPort,
        namespace: bytes,
        ends: frozenset[int],
        *,
        is_owner: bool = True,
    ) -> None:
        """`namespace` identifies the model's content. `ends` are the tokens that end an answer. If
        `is_owner`, `close` also closes `turns`."""
        self._format = chat_format
        self._ends = ends
        self._turns = turns
        self._is_owner = is_owner
        self._namespace = namespace
        self._spellings = ToolSpellings()

    def render(self, chat: Chat, tenant: str, *, keep: bool = True) -> Replayed:
        """Return the conversation as tokens. Records nothing if `keep` is false. Raises
        InvalidRequestError if the template refuses the conversation."""
        name = tenant.encode("utf-8", "surrogatepass")
        owner = turns_owner(tenant)
        scope = digest("turns-v1", self._namespace, name)
        found = self._render(chat, scope, owner, keep=keep)
        return replace(found, owner=owner, defaults=defaults_of(chat.tools))

    def _render(self, chat: Chat, scope: bytes, owner: bytes, *, keep: bool) -> Replayed:
        texts = [tool_text(tool) for tool in chat.tools]
        tools = self._spellings.first(chat.tools, texts, scope, keep=keep)
        chat = replace(chat, tools=tools)
        at = points(chat, scope, texts)
        numbers = answers(chat.messages)
        self._turns.look_up(owner, [at[number + 1] for number in numbers])
        turns = _Turns(self._turns, at)
        found: dict[int, Answered] = {}
        for position in reversed(range(len(numbers))):
            number = numbers[position]
            if self._format.headers is not None and not chat.messages[number].tool_calls:
                break
            found[number] = _answered(turns.ending_with(number), chat.messages[number])
            known = self._known(turns, chat.messages, numbers[: position + 1])
            if known is None:
                continue
            after = self._format.render_after(chat, number + 1)
            if after is not None:
                del found[number]
                rendered = RenderedChat((*known.tokens, *after.tokens), after.opens_thought)
                start = len(known.tokens)
                return Replayed(rendered, at[-1], known.digest, start, number + 1, found, texts)
            if self._format.loops_only:
                break
        return Replayed(self._format.render(chat), at[-1], answers=found, tool_texts=texts)

    def record(
        self, replayed: Replayed, prompt: Sequence[int], message: Message, generated: Sequence[int]
    ) -> Future[None] | None:
        """Record a turn with the answer `message`. The tokens are `prompt`, then `generated`."""
        return self._turns.put(
            Turn(
                point_after(replayed.point, message, replayed.defaults),
                replayed.parent,
                replayed.start,
                (*prompt[replayed.start :], *generated),
                thought_digest(message.reasoning),
                replayed.owner,
            )
        )

    def record_cut(self, replayed: Replayed, message: Message) -> Future[None] | None:
        """Record a turn without tokens, which requests cannot continue."""
        point = point_after(replayed.point, message, replayed.defaults)
        thought = thought_digest(message.reasoning)
        return self._turns.put(Turn(point, None, 0, (), thought, replayed.owner))

    def close(self) -> None:
        if self._is_owner:
            self._turns.close()

    def _known(
        self, turns: _Turns, messages: Sequence[Message], numbers: Sequence[int]
    ) -> _Known | None:
        """Return the tokens of `turns`; None if unknown, or if a message contradicts a turn."""
        found: list[Turn] = []
        for number in reversed(numbers):
            turn = turns.ending_with(number)
            if turn is not None and turn.tokens and (not found or _continues(found[-1], turn)):
                if not agrees(turn, messages[number]):
                    return None
                found.append(turn)
                if turn.parent is None:
                    return self._joined(found[::-1])
            elif not found:
                return None
        return None

    def _joined(self, turns: Sequence[Turn]) -> _Known | None:
        """Return the turns' tokens; None if two turns do not fit together."""
        tokens: list[int] = []
        for turn in turns:
            del tokens[turn.start :]
            tokens += turn.tokens
        if tokens[-1] in self._ends:
            tokens.pop()
        later = turns[1:]
        *parents, whole = _prefix_digests(tokens, [*(turn.start for turn in later), len(tokens)])
        if parents != [turn.parent for turn in later]:
            return None
        return _Known(tokens, whole)


class _Turns:
    def __init__(self, turns: TurnsPort, at: Sequence[Point]) -> None:
        self._turns = turns
        self._at = at
        self._found: dict[int, Turn | None] = {}

    def ending_with(self, number: int) -> Turn | None:
        if number not in self._found:
            self._found[number] = self._turns.get(self._at[number + 1])
        return self._found[number]


def _continues(turn: Turn, before: Turn) -> bool:
    # The end token of `before` may be missing.
    return before.end - 1 <= turn.start <= before.end


def _prefix_digests(tokens: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    # `lengths` are in ascending order.
    packed = memoryview(pack_tokens(tokens))
    running = hashlib.blake2b(digest_size=_DIGEST_BYTES)  # over all tokens, so the fastest hash
    found, done = [], 0
    for length in lengths:
        running.update(packed[done * TOKEN_BYTES : length * TOKEN_BYTES])
        found.append(running.digest())
        done = length
    return found


def _answered(turn: Turn | None, message: Message) -> Answered:
    if turn is None:
        return Answered.OTHER
    if not agrees(turn, message):
        return Answered.RETHOUGHT
    if not turn.tokens:
        return Answered.CUT
    return Answered.PLAIN if turn.thought == thought_digest("") else Answered.THOUGHT
