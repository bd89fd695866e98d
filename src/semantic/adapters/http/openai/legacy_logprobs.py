"""Log-probabilities as the completions wire tells them: four lists of the same length.

Knows texts and offsets; not which tokens are the prompt's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from semantic.adapters.http.openai.token_logprobs import finite, texts_of
from semantic.domain.value_objects import TokenLogprob
from semantic.ports.serving import ServingPort


@dataclass(slots=True)
class LegacyLogprobs:
    """An entry for each token. A token that follows nothing has no log-probability.

    `text_offset` is where a token begins in the choice's text, in characters.
    """

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def extend(self, more: LegacyLogprobs) -> None:
        """Add the entries of the tokens that follow."""
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset

    def body(self) -> dict[str, object]:
        """As JSON."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


async def legacy_logprobs(
    serving: ServingPort,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    offset: int,
    length: int,
) -> LegacyLogprobs:
    """Of `tokens`, whose text is `length` characters long and begins at `offset`.

    A token that is only a part of a character begins at the character's end at the latest.
    """
    texts = await texts_of(serving, tokens, logprobs)
    found = LegacyLogprobs()
    end = offset + length
    for token, logprob in zip(tokens, logprobs, strict=True):
        found.tokens.append(texts[token])
        found.token_logprobs.append(None if logprob is None else finite(logprob.logprob))
        found.top_logprobs.append(None if logprob is None else _by_text(logprob, texts))
        found.text_offset.append(min(offset, end))
        offset += len(texts[token])
    return found


def _by_text(logprob: TokenLogprob, texts: Mapping[int, str]) -> dict[str, float]:
    """The likeliest tokens and the one that is there. Of two with one text the likelier counts."""
    found: dict[str, float] = {}
    for token, value in (*logprob.top, (logprob.token, logprob.logprob)):
        text = texts[token]
        found[text] = max(finite(value), found.get(text, finite(value)))
    return found
