"""Verbatim replay: a conversation that is known goes on in the tokens in which it was computed.

A template may write an answer differently from how the model did: it drops thoughts, renders calls
anew, moves messages. Only what is new is rendered here; what was said stands as it was. Knows
points and tokens; no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from semantic.application.chat.tool_spellings import ToolSpellings
from semantic.domain.block_hash import TOKEN_BYTES, pack_tokens
from semantic.domain.chat import Chat, Message
from semantic.domain.digest import digest
from semantic.domain.history import (
    Point,
    Turn,
    agrees,
    answers,
    point_after,
    points,
    thought_digest,
    tool_text,
)
from semantic.domain.request_parts import Given
from semantic.ports.chat import ChatFormat, RenderedChat
from semantic.ports.turns import TurnsPort

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rendered conversation, and where it goes on from.

    Its first `start` tokens, of which `parent` is the digest, are those of a turn; `point` is where
    it stands. The first `kept` messages stand in those tokens; `given` says what is known of later
    answers. `tool_texts` are what the tools say.
    """

    rendered: RenderedChat
    point: Point
    parent: bytes | None = None
    start: int = 0
    kept: int = 0
    given: Mapping[int, Given] = field(default_factory=dict)
    tool_texts: Sequence[bytes] | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """The tokens of a known conversation without what ends them, and their digest."""

    tokens: list[int]
    digest: bytes


class Replay:
    """Renders conversations of one model. Any thread may call it."""

    def __init__(
        self, chat_format: ChatFormat, turns: TurnsPort, namespace: bytes, ends: frozenset[int]
    ) -> None:
        """`namespace` names the model's content: with another template or tokenizer no turn is
        known. `ends` are the tokens that end an answer."""
        self._format = chat_format
        self._ends = ends
        self._turns = turns
        self._namespace = namespace
        self._spellings = ToolSpellings()

    def render(self, chat: Chat, tenant: str) -> Replayed:
        """The conversation in tokens. Raises InvalidRequestError when the template refuses it."""
        scope = digest("turns-v1", self._namespace, tenant.encode("utf-8", "surrogatepass"))
        texts = [tool_text(tool) for tool in chat.tools]
        chat = replace(chat, tools=self._spellings.first(chat.tools, texts, scope))
        at = points(chat, scope, texts)
        numbers = answers(chat.messages)
        turns = _Turns(self._turns, at)
        given: dict[int, Given] = {}
        for position in reversed(range(len(numbers))):
            number = numbers[position]
            given[number] = _given(turns.behind(number), chat.messages[number])
            known = self._known(turns, chat.messages, numbers[: position + 1])
            if known is None:
                continue
            after = self._format.render_after(chat, number + 1)
            if after is not None:
                del given[number]
                rendered = RenderedChat((*known.tokens, *after.tokens), after.opens_thought)
                start = len(known.tokens)
                return Replayed(rendered, at[-1], known.digest, start, number + 1, given, texts)
        return Replayed(self._format.render(chat), at[-1], given=given, tool_texts=texts)

    def remember(
        self, replayed: Replayed, prompt: Sequence[int], said: Message, generated: Sequence[int]
    ) -> None:
        """`replayed`, which was computed as `prompt`, was answered with `said` in the tokens
        `generated`."""
        self._turns.put(
            Turn(
                point_after(replayed.point, said),
                replayed.parent,
                replayed.start,
                (*prompt[replayed.start :], *generated),
                thought_digest(said.reasoning),
            )
        )

    def remember_cut(self, replayed: Replayed, said: Message) -> None:
        """`replayed` was answered with `said`, of which the model wrote more than was told: the
        conversation cannot go on in those tokens."""
        point = point_after(replayed.point, said)
        if self._turns.get(point) is None:
            self._turns.put(Turn(point, None, 0, (), thought_digest(said.reasoning)))

    def close(self) -> None:
        """Keep what there is to keep."""
        self._turns.close()

    def _known(
        self, turns: _Turns, messages: Sequence[Message], numbers: Sequence[int]
    ) -> _Known | None:
        """What is known up to the last of the answers `numbers`; None when it is not known, or
        when a message says otherwise."""
        found: list[Turn] = []
        for number in reversed(numbers):
            turn = turns.behind(number)
            if turn is not None and turn.tokens and (not found or _may_stand_on(found[-1], turn)):
                if not agrees(turn, messages[number]):
                    return None
                found.append(turn)
                if turn.parent is None:
                    return self._joined(found[::-1])
            elif not found:
                return None
        return None

    def _joined(self, turns: Sequence[Turn]) -> _Known | None:
        """The tokens of turns, of which each but the first goes on from the one before; None when
        one went on from other tokens than the ones that are there."""
        tokens: list[int] = []
        for turn in turns:
            del tokens[turn.start :]
            tokens += turn.tokens
        if tokens[-1] in self._ends:
            tokens.pop()
        later = turns[1:]
        *parents, whole = _beginnings(tokens, [*(turn.start for turn in later), len(tokens)])
        if parents != [turn.parent for turn in later]:
            return None
        return _Known(tokens, whole)


class _Turns:
    """The turns behind the messages of one conversation; each is looked for once."""

    def __init__(self, turns: TurnsPort, at: Sequence[Point]) -> None:
        self._turns = turns
        self._at = at
        self._found: dict[int, Turn | None] = {}

    def behind(self, number: int) -> Turn | None:
        """The turn that ends with message `number`."""
        if number not in self._found:
            self._found[number] = self._turns.get(self._at[number + 1])
        return self._found[number]


def _may_stand_on(turn: Turn, before: Turn) -> bool:
    """Whether `turn` leaves `before` at its end, or at the token that ends it."""
    return before.end - 1 <= turn.start <= before.end


def _beginnings(tokens: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """The digests of the first so many tokens, for each of the `lengths`; none is less than the
    one before it."""
    packed = memoryview(pack_tokens(tokens))
    running = hashlib.blake2b(digest_size=_DIGEST_BYTES)  # of all tokens, so the fastest there is
    found, done = [], 0
    for length in lengths:
        running.update(packed[done * TOKEN_BYTES : length * TOKEN_BYTES])
        found.append(running.digest())
        done = length
    return found


def _given(turn: Turn | None, message: Message) -> Given:
    """What is known of an answer that `turn` is of."""
    if turn is None:
        return Given.OTHER
    if not agrees(turn, message):
        return Given.RETHOUGHT
    if not turn.tokens:
        return Given.CUT
    return Given.PLAIN if turn.thought == thought_digest("") else Given.THOUGHT
