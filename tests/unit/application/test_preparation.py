"""What is refused before it costs anything."""

from __future__ import annotations

import pytest

from semantic.application.preparation import Preparation
from semantic.application.recent_turns import RecentTurns
from semantic.application.replay import Replay
from semantic.domain.chat import Chat, Message
from semantic.domain.errors import ContextOverflowError
from semantic.domain.value_objects import SamplingParams
from semantic.ports.chat import RenderedChat
from semantic.ports.serving import Ask, Prompt
from tests.support.fake_chat_format import FakeChatFormat
from tests.support.fake_tokenizer import ByteTokenizer

LIMIT, LONGEST = 100, 4


class Untouched(ByteTokenizer):
    """Nobody may ask it for the tokens of a long text."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < LIMIT * LONGEST
        return super().encode(text, add_special_tokens=add_special_tokens)


class UntouchedFormat(FakeChatFormat):
    """Nobody may have it render a long conversation."""

    def render(self, chat: Chat) -> RenderedChat:
        assert chat.length < LIMIT * LONGEST
        return super().render(chat)


def preparation() -> Preparation:
    chat_format, tokenizer = UntouchedFormat(), Untouched()
    replay = Replay(chat_format, RecentTurns(1 << 20), b"model", tokenizer.eos_token_ids)
    return Preparation(tokenizer, chat_format, replay, lambda _: None, LIMIT, longest_token=LONGEST)


LONG = "a" * LIMIT * LONGEST


@pytest.mark.parametrize(
    ("prompt", "is_chat"),
    [
        (LONG, False),
        (Chat((Message("user", LONG),)), True),
        (Chat(tuple(Message("user", "a" * LIMIT) for _ in range(LONGEST))), True),
    ],
    ids=["text", "message", "messages"],
)
def test_a_text_that_cannot_fit_is_refused_before_its_tokens_are_counted(
    prompt: Prompt, is_chat: bool
) -> None:
    for ask in (preparation().tokens, lambda p: preparation().prepare(Ask(p, SamplingParams()))):
        with pytest.raises(ContextOverflowError) as caught:
            ask(prompt)
        assert (caught.value.prompt_tokens, caught.value.limit) == (LIMIT, LIMIT)
        assert caught.value.is_chat is is_chat


def test_a_text_that_may_fit_is_encoded() -> None:
    assert len(preparation().tokens("a" * 50)) == 51
