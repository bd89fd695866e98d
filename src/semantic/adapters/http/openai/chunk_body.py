"""What the chunks of both wires have in common: their head, and usage when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from semantic.adapters.http.openai.reply_head import ReplyHead
from semantic.adapters.http.openai.stream_options import StreamOptions
from semantic.adapters.http.openai.usage import UsageSum, usage_body
from semantic.domain.answer import Usage


@dataclass(frozen=True, slots=True)
class ChunkBodies:
    """Makes the JSON objects of a stream whose chunks are of this `kind`.

    With usage asked for, each has a field for it, as OpenAI's have.
    """

    kind: str
    head: ReplyHead
    options: StreamOptions
    usage: UsageSum

    def of(self, choice: dict[str, object], index: int, ended: Usage | None) -> dict[str, object]:
        """The chunk with `choice`; `ended` is what choice number `index` took, with its end."""
        body = self.head.body(self.kind) | {"choices": [choice]}
        if ended is not None:
            self.usage.add(index, ended)
        if self.options.usage:
            known = self.options.running_usage and ended is not None
            body["usage"] = usage_body(self.usage.total()) if known else None
        return body

    def last(self) -> dict[str, object] | None:
        """The chunk after all pieces, which tells the usage; None when nobody asked for it."""
        if not self.options.usage:
            return None
        usage = usage_body(self.usage.total())
        return self.head.body(self.kind) | {"choices": [], "usage": usage}
