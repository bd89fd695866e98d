"""Pieces of a completion as what is sent: the chunks of a stream, or one whole reply.

Both have the same shape, and the reply is the sum of what the chunks say. Knows OpenAI's shapes;
not where pieces come from.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from semantic.adapters.http.openai.chunk_body import ChunkBodies
from semantic.adapters.http.openai.completion_pieces import CompletionPiece
from semantic.adapters.http.openai.legacy_logprobs import LegacyLogprobs
from semantic.adapters.http.openai.reply_head import ReplyHead
from semantic.adapters.http.openai.stream_options import StreamOptions
from semantic.adapters.http.openai.usage import UsageSum, usage_body

_KIND = "text_completion"


class CompletionChunks:
    """Makes the chunks of a stream."""

    def __init__(self, head: ReplyHead, options: StreamOptions, usage: UsageSum) -> None:
        self._bodies = ChunkBodies(_KIND, head, options, usage)
        self.last = self._bodies.last

    def chunk(self, piece: CompletionPiece) -> dict[str, object]:
        """The chunk that says `piece`."""
        choice = _choice(piece.index, piece.text, piece.logprobs, piece.finish)
        return self._bodies.of(choice, piece.index, piece.usage)


@dataclass(slots=True)
class _Text:
    """A choice as far as it has come."""

    pieces: list[str] = field(default_factory=list)
    logprobs: LegacyLogprobs = field(default_factory=LegacyLogprobs)
    finish: str | None = None

    def add(self, piece: CompletionPiece) -> None:
        self.pieces.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.finish = piece.finish or self.finish


async def completion_reply(
    pieces: AsyncIterator[CompletionPiece], head: ReplyHead, usage: UsageSum
) -> dict[str, object]:
    """The whole reply, once all pieces have come."""
    texts: dict[int, _Text] = {}
    async for piece in pieces:
        texts.setdefault(piece.index, _Text()).add(piece)
        if piece.usage is not None:
            usage.add(piece.index, piece.usage)
    choices = [
        _choice(index, "".join(text.pieces), text.logprobs, text.finish)
        for index, text in sorted(texts.items())
    ]
    return head.body(_KIND) | {"choices": choices, "usage": usage_body(usage.total())}


def _choice(
    index: int, text: str, logprobs: LegacyLogprobs, finish: str | None
) -> dict[str, object]:
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs.body() if logprobs else None,
        "finish_reason": finish,
    }
