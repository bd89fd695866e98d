"""Every prompt of a conversation begins with all tokens the model has seen in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from semantic.bootstrap import load
from semantic.cli.conversation import Conversation, has_chat_template, message
from semantic.domain.errors import InvalidRequestError
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_tokenizer import BOS, ByteTokenizer

TWO_LETTERS = 258
"""The token that is "ab" at once, which the tokenizer itself never gives."""


class PlainTokenizer(ByteTokenizer):
    """Its template writes no BOS, so a rendered text says all of its tokens."""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        return super().render_chat(messages, add_generation_prompt=add_generation_prompt)[1:]


class ForgetfulTokenizer(PlainTokenizer):
    """Its template leaves past answers out, as those of thinking models do in part."""

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        asked = [one for one in messages if one["role"] != "assistant"]
        return super().render_chat(asked, add_generation_prompt=add_generation_prompt)


def test_the_first_prompt_is_the_template_and_later_ones_extend_what_was_seen() -> None:
    tokenizer = PlainTokenizer([b"ab"])
    talk = Conversation(tokenizer, system="be brief")
    first = talk.ask("one")
    assert list(first) == tokenizer.render_chat(
        [message("system", "be brief"), message("user", "one")]
    )
    answer = (TWO_LETTERS, ord("c"))
    talk.answered("one", "abc", answer)
    second = talk.ask("two")
    assert second[: len(first) + 2] == (*first, *answer)
    assert tokenizer.decode(second) == tokenizer.decode(tokenizer.render_chat(
        [*talk.messages, message("user", "two")]
    ))  # fmt: skip


def test_tokens_that_no_text_shows_are_kept() -> None:
    tokenizer = ByteTokenizer([b"ab"])
    talk = Conversation(tokenizer)
    assert talk.ask("one")[0] == BOS
    talk.answered("one", "ab", (TWO_LETTERS,))
    rendered = tokenizer.render_chat([*talk.messages, message("user", "two")])
    assert list(talk.ask("two")) == rendered


def test_a_question_without_an_answer_leaves_no_trace() -> None:
    talk = Conversation(ByteTokenizer())
    talk.ask("cancelled")
    assert talk.ask("one") == Conversation(ByteTokenizer()).ask("one")


def test_a_template_that_rewrites_the_past_wins() -> None:
    tokenizer = ForgetfulTokenizer()
    talk = Conversation(tokenizer)
    talk.ask("one")
    talk.answered("one", "abc", tuple(b"abc"))
    rendered = tokenizer.render_chat([message("user", "one"), message("user", "two")])
    assert list(talk.ask("two")) == rendered


def test_text_of_a_stop_string_that_was_cut_off_is_not_kept() -> None:
    tokenizer = PlainTokenizer()
    talk = Conversation(tokenizer)
    talk.ask("one")
    talk.answered("one", "ab", tuple(b"abSTOP"))
    assert "STOP" not in tokenizer.decode(talk.ask("two"))


def test_reset_leaves_the_system_message() -> None:
    talk = Conversation(ByteTokenizer(), system="be brief")
    first = talk.ask("one")
    talk.answered("one", "abc", tuple(b"abc"))
    talk.reset()
    assert talk.ask("one") == first


def test_the_embedded_model_has_a_template_whose_conversations_only_grow() -> None:
    _, tokenizer = load()
    talk = Conversation(tokenizer)
    seen: tuple[int, ...] = ()
    for answer in ("Hello! How can I help you?", "", "Your name is Zoë – \n\n or not"):
        prompt = talk.ask("  What is my name?  ")
        assert prompt[: len(seen)] == seen
        tokens = (*tokenizer.encode(answer), *tokenizer.eos_token_ids)
        talk.answered("  What is my name?  ", answer, tokens)
        seen = (*prompt, *tokens)
    assert seen == tuple(tokenizer.render_chat(talk.messages, add_generation_prompt=False))


def test_a_model_without_a_template_is_recognised() -> None:
    assert has_chat_template(ByteTokenizer())
    assert not has_chat_template(CharTokenizer())
    with pytest.raises(InvalidRequestError):
        Conversation(CharTokenizer()).ask("one")
