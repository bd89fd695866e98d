"""Recorded sessions of coding agents as prompts of few words, and how much could be reused.

A recording has lengths and which pieces of 64 tokens are equal, no text. Every piece becomes a few
words of one token each, so prompts keep their structure at a part of their length. Knows files and
prompts; no server.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

from semantic.ports.generation import Tokenizer

_WORD = re.compile(r" [A-Za-z]+")
_Tree = dict[int, object]
"""Prefixes of pieces: what follows each."""
_APART = 20_011
"""Pieces of one session are so far from those of the next: equal numbers are other text there."""


class RecordedRequest(TypedDict):
    """A request of a recording; see `recorded_sessions`."""

    agent: str
    keep: int
    new: list[int]


class RecordedSession(TypedDict):
    """A session of a recording."""

    id: str
    requests: list[RecordedRequest]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: its prompt, and how many of its tokens an earlier prompt of the session had."""

    prompt: str
    n_tokens: int
    reusable: int


@dataclass(frozen=True, slots=True)
class Session:
    """The requests of one recorded session, in order."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt."""
        return max(turn.n_tokens for turn in self.turns)


def recorded_sessions(path: Path) -> list[RecordedSession]:
    """The sessions in a file of one JSON object a line, compressed.

    A request's prompt is the first `keep` pieces of the one before of the same `agent`, then `new`.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [cast(RecordedSession, json.loads(line)) for line in lines]


def sessions(
    recorded: Sequence[RecordedSession], words: Sequence[str], *, most_turns: int, piece_tokens: int
) -> list[Session]:
    """The first `most_turns` requests of each session as prompts made of `words`.

    Each piece is `piece_tokens` words, two or more; fewer make a replay cheaper.
    """
    return [
        Session(one["id"], tuple(_turns(requests, _Text(words, number, piece_tokens))))
        for number, one in enumerate(recorded)
        for requests in [one["requests"][:most_turns]]
    ]


def single_words(tokenizer: Tokenizer, vocabulary: int) -> list[str]:
    """The words that are one token each, in any text of such words."""
    texts = ((token, tokenizer.decode([token])) for token in range(vocabulary))
    return [
        text
        for token, text in texts
        if _WORD.fullmatch(text) and tokenizer.encode(text, add_special_tokens=False) == [token]
    ]


@dataclass(frozen=True, slots=True)
class _Text:
    """The words of one session's pieces: other pieces are other words."""

    words: Sequence[str]
    session: int
    piece_tokens: int

    def of(self, pieces: Sequence[int]) -> str:
        """The text of a prompt."""
        return "".join(map(self._of_one, pieces))

    def _of_one(self, piece: int) -> str:
        high, low = divmod(self.session * _APART + piece, len(self.words))
        return self.words[high % len(self.words)] + self.words[low] * (self.piece_tokens - 1)


def _turns(requests: Iterable[RecordedRequest], text: _Text) -> Iterator[Turn]:
    latest: dict[str, list[int]] = {}
    known: _Tree = {}
    for request in requests:
        pieces = latest.get(request["agent"], [])[: request["keep"]] + request["new"]
        latest[request["agent"]] = pieces
        shared = _learn(known, pieces)
        size = text.piece_tokens
        yield Turn(text.of(pieces), size * len(pieces), size * shared)


def _learn(tree: _Tree, pieces: Sequence[int]) -> int:
    """Add `pieces` to a tree of prefixes; how many of them it had."""
    shared, new = 0, False
    for piece in pieces:
        new = new or piece not in tree
        shared += not new
        tree = cast(_Tree, tree.setdefault(piece, {}))
    return shared
