"""Log-probabilities of tokens in the shape of chat completions: by text, with alternatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from typing_extensions import TypedDict

from semantic.domain.value_objects import TokenLogprob
from semantic.ports.serving import ServingPort

_MINUS_INFINITY: Final = -9999.0
"""OpenAI's value for a probability of 0: JSON has no minus infinity."""

_INCOMPLETE: Final = "\ufffd"
"""In the text of a token that is only part of a character."""


class TopLogprob(TypedDict):
    """A candidate token. `bytes` is null for a part of a character."""

    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(TopLogprob):
    """A generated token and the likeliest candidates at its position."""

    top_logprobs: list[TopLogprob]


def finite(logprob: float) -> float:
    """`logprob`, with OpenAI's -9999 for minus infinity."""
    return max(logprob, _MINUS_INFINITY)


async def texts_of(
    serving: ServingPort, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> Mapping[int, str]:
    """The text of each token in `tokens` and in `logprobs`, by token id."""
    ids = set(tokens)
    for one in logprobs:
        if one is not None:
            ids |= {one.token, *(token for token, _ in one.top)}
    if not ids:
        return {}
    ordered = sorted(ids)
    return dict(zip(ordered, await serving.token_texts(ordered), strict=True))


async def chat_logprobs(
    serving: ServingPort, logprobs: Sequence[TokenLogprob]
) -> list[ChatTokenLogprob]:
    """`logprobs` as the list `choices[].logprobs.content`."""
    texts = await texts_of(serving, (), logprobs)
    return [
        {
            **_top(texts[one.token], one.logprob),
            "top_logprobs": [_top(texts[token], logprob) for token, logprob in one.top],
        }
        for one in logprobs
    ]


def _top(text: str, logprob: float) -> TopLogprob:
    whole = _INCOMPLETE not in text
    return {
        "token": text,
        "bytes": list(text.encode("utf-8", "surrogatepass")) if whole else None,
        "logprob": finite(logprob),
    }
