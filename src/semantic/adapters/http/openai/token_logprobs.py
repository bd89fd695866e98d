"""Log-probabilities of tokens as the chat wire tells them: by text, with the likeliest others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from typing_extensions import TypedDict

from semantic.domain.value_objects import TokenLogprob
from semantic.ports.serving import ServingPort

_IMPOSSIBLE: Final = -9999.0
"""How OpenAI writes the log-probability of what cannot be; JSON has no minus infinity."""

_INCOMPLETE: Final = "\ufffd"


class TopLogprob(TypedDict):
    """A token that could have been there; `bytes` is null for a part of a character."""

    token: str
    bytes: list[int] | None
    logprob: float


class ChatTokenLogprob(TopLogprob):
    """A token that is there, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


def finite(logprob: float) -> float:
    """`logprob`, or what stands for minus infinity."""
    return max(logprob, _IMPOSSIBLE)


async def texts_of(
    serving: ServingPort, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> Mapping[int, str]:
    """The text of each of `tokens`, and of each token that `logprobs` name."""
    ids = set(tokens)
    for one in logprobs:
        if one is not None:
            ids |= {one.token, *(token for token, _ in one.top)}
    ordered = sorted(ids)
    return dict(zip(ordered, await serving.token_texts(ordered), strict=True))


async def chat_logprobs(
    serving: ServingPort, logprobs: Sequence[TokenLogprob]
) -> list[ChatTokenLogprob]:
    """`logprobs` in the shape of `choices[].logprobs.content`."""
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
