"""Pieces of a chat completion as what is sent: the chunks of a stream, or one whole reply.

The reply is the sum of what the chunks say. Knows OpenAI's shapes; not where pieces come from.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from semantic.adapters.http.openai.chat_pieces import CallDelta, ChatPiece
from semantic.adapters.http.openai.chunk_body import ChunkBodies
from semantic.adapters.http.openai.reply_head import ReplyHead
from semantic.adapters.http.openai.stream_options import StreamOptions
from semantic.adapters.http.openai.token_logprobs import ChatTokenLogprob
from semantic.adapters.http.openai.usage import UsageSum, usage_body

_CHUNK = "chat.completion.chunk"


class ChatChunks:
    """Makes the chunks of a stream."""

    def __init__(self, head: ReplyHead, options: StreamOptions, usage: UsageSum) -> None:
        self._bodies = ChunkBodies(_CHUNK, head, options, usage)
        self.last = self._bodies.last

    def chunk(self, piece: ChatPiece) -> dict[str, object]:
        """The chunk that says `piece`."""
        choice: dict[str, object] = {
            "index": piece.index,
            "delta": piece.delta,
            "logprobs": _logprobs(piece.logprobs),
            "finish_reason": piece.finish,
        }
        return self._bodies.of(choice, piece.index, piece.usage)


async def chat_reply(
    pieces: AsyncIterator[ChatPiece], head: ReplyHead, usage: UsageSum
) -> dict[str, object]:
    """The whole reply, once all pieces have come."""
    messages: dict[int, _Message] = {}
    async for piece in pieces:
        messages.setdefault(piece.index, _Message()).add(piece)
        if piece.usage is not None:
            usage.add(piece.index, piece.usage)
    choices = [messages[index].choice(index) for index in sorted(messages)]
    return head.body("chat.completion") | {"choices": choices, "usage": usage_body(usage.total())}


@dataclass(slots=True)
class _Call:
    """A call as far as it has come."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def add(self, delta: CallDelta) -> None:
        function = delta["function"]
        self.id += delta.get("id", "")
        self.name += function.get("name", "")
        self.arguments += function.get("arguments", "")

    def body(self) -> dict[str, object]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class _Message:
    """A choice as far as it has come."""

    contents: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: ChatPiece) -> None:
        if "content" in piece.delta:
            self.contents.append(piece.delta["content"])
        if "reasoning" in piece.delta:
            self.reasoning.append(piece.delta["reasoning"])
        for delta in piece.delta.get("tool_calls", []):
            self.calls.setdefault(delta["index"], _Call()).add(delta)
        self.logprobs += piece.logprobs
        self.finish = piece.finish or self.finish

    def choice(self, index: int) -> dict[str, object]:
        """The choice as JSON; what a message does not have is left out, as OpenAI does."""
        content = "".join(self.contents) if self.contents else None
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            reasoning = "".join(self.reasoning)
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self.calls:
            message["tool_calls"] = [self.calls[number].body() for number in sorted(self.calls)]
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(self.logprobs),
            "finish_reason": self.finish,
        }


def _logprobs(
    content: list[ChatTokenLogprob] | tuple[ChatTokenLogprob, ...],
) -> dict[str, object] | None:
    return {"content": list(content), "refusal": None} if content else None
