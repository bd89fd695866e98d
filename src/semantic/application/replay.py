"""Verbatim replay: a conversation that is known goes on in the tokens in which it was computed.

A template may write an answer differently from how the model did: it drops thoughts, renders calls
anew, moves messages. Only what is new is rendered here; what was said stands as it was. Knows
points and tokens; no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
)
from semantic.domain.request_parts import Given
from semantic.ports.chat import ChatFormat, RenderedChat
from semantic.ports.turns import TurnsPort


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rendered conversation, and where it goes on from.

    Its first `start` tokens are those of the turn at `parent`; `point` is where it stands. The
    first `kept` messages stand in those tokens; `given` says what is known of later answers.
    """

    rendered: RenderedChat
    point: Point
    parent: Point | None = None
    start: int = 0
    kept: int = 0
    given: Mapping[int, Given] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """The turns that lead to a point, the last one first."""

    turns: list[Turn] = field(default_factory=list)

    def tokens(self) -> list[int]:
        tokens: list[int] = []
        for turn in reversed(self.turns):
            del tokens[turn.start :]
            tokens += turn.tokens
        return tokens


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

    def render(self, chat: Chat, tenant: str) -> Replayed:
        """The conversation in tokens. Raises InvalidRequestError when the template refuses it."""
        scope = digest("turns-v1", self._namespace, tenant.encode("utf-8", "surrogatepass"))
        at = points(chat, scope)
        given: dict[int, Given] = {}
        for number in reversed(answers(chat.messages)):
            turn = self._turns.get(at[number + 1])
            given[number] = _given(turn)
            known = None if turn is None else self._known(at, chat.messages, number + 1)
            if known is None:
                continue
            after = self._format.render_after(chat, number + 1)
            if after is not None:
                del given[number]
                joined = self._joined(known.tokens(), after, at, number + 1)
                return replace(joined, given=given)
        return Replayed(self._format.render(chat), at[-1], given=given)

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

    def close(self) -> None:
        """Keep what there is to keep."""
        self._turns.close()

    def _known(
        self, at: Sequence[Point], messages: Sequence[Message], n_messages: int
    ) -> _Known | None:
        """The turns up to the first `n_messages`; None when one is not known or says otherwise."""
        said = dict(zip(at[1:], messages, strict=True))
        known, point = _Known(), at[n_messages]
        while True:
            turn = self._turns.get(point)
            message = said.get(point)
            if turn is None or message is None or not agrees(turn, message):
                return None
            known.turns.append(turn)
            if turn.parent is None:
                return known
            point = turn.parent

    def _joined(
        self, tokens: list[int], after: RenderedChat, at: Sequence[Point], n_messages: int
    ) -> Replayed:
        """What is known, ended as the template ends an answer, and what comes after it."""
        if tokens and tokens[-1] in self._ends:
            tokens.pop()
        rendered = RenderedChat((*tokens, *after.tokens), after.opens_thought)
        return Replayed(rendered, at[-1], at[n_messages], len(tokens), n_messages)


def _given(turn: Turn | None) -> Given:
    """What is known of an answer that `turn` is of."""
    if turn is None:
        return Given.OTHER
    return Given.PLAIN if turn.thought == thought_digest("") else Given.THOUGHT
