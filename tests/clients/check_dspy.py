"""DSPy's language model: one answer, several, and a conversation, on two of OpenAI's APIs."""

from __future__ import annotations

import dspy  # type: ignore[import-not-found]
import pytest

from tests.clients import talk


def make(url: str, kind: str) -> dspy.LM:
    return dspy.LM(
        f"openai/{talk.MODEL}",
        api_base=f"{url}/v1",
        api_key="none",
        max_tokens=60,
        cache=False,
        num_retries=0,
        model_type=kind,
    )


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_an_answer(url: str, kind: str) -> None:
    model = make(url, kind)
    (found,) = model(talk.HELLO)
    assert talk.HELLO_ANSWER in (found, found["text"] if isinstance(found, dict) else None)
    assert model.history[-1]["usage"]["total_tokens"] > 1


def test_several_answers(url: str) -> None:
    assert make(url, "chat")(talk.HELLO, n=2) == [talk.HELLO_ANSWER] * 2


def test_the_same_again_is_not_computed(url: str) -> None:
    model = make(url, "chat")
    for _ in range(2):
        model(talk.reading("prompt"))
    usage = model.history[-1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["prompt_tokens"] - 4 <= cached < usage["prompt_tokens"]
