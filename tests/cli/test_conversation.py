"""Every prompt of a conversation begins with all tokens the model has seen in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from semantic.bootstrap import load
from semantic.cli.conversation import Conversation, has_chat_template, message
from semantic.domain.block_hash import Scope
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_tokenizer import BOS, EOS, ByteTokenizer

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
    first = talk.next_prompt("one")
    assert list(first) == tokenizer.render_chat(
        [message("system", "be brief"), message("user", "one")]
    )
    answer = (TWO_LETTERS, ord("c"))
    talk.add_turn("one", "abc", answer)
    second = talk.next_prompt("two")
    assert second[: len(first) + 2] == (*first, *answer)
    assert tokenizer.decode(second) == tokenizer.decode(tokenizer.render_chat(
        [*talk.messages, message("user", "two")]
    ))  # fmt: skip


def test_tokens_that_no_text_shows_are_kept() -> None:
    tokenizer = ByteTokenizer([b"ab"])
    talk = Conversation(tokenizer)
    assert talk.next_prompt("one")[0] == BOS
    talk.add_turn("one", "ab", (TWO_LETTERS,))
    rendered = tokenizer.render_chat([*talk.messages, message("user", "two")])
    assert list(talk.next_prompt("two")) == rendered


def test_a_question_without_an_answer_leaves_no_trace() -> None:
    talk = Conversation(ByteTokenizer())
    talk.next_prompt("cancelled")
    assert talk.next_prompt("one") == Conversation(ByteTokenizer()).next_prompt("one")


def test_a_template_that_rewrites_the_past_wins() -> None:
    tokenizer = ForgetfulTokenizer()
    talk = Conversation(tokenizer)
    talk.next_prompt("one")
    talk.add_turn("one", "abc", tuple(b"abc"))
    rendered = tokenizer.render_chat([message("user", "one"), message("user", "two")])
    assert list(talk.next_prompt("two")) == rendered


def test_text_of_a_stop_string_that_was_cut_off_is_not_kept() -> None:
    tokenizer = PlainTokenizer()
    talk = Conversation(tokenizer)
    talk.next_prompt("one")
    talk.add_turn("one", "ab", tuple(b"abSTOP"))
    assert "STOP" not in tokenizer.decode(talk.next_prompt("two"))


def test_reset_leaves_the_system_message() -> None:
    talk = Conversation(ByteTokenizer(), system="be brief")
    first = talk.next_prompt("one")
    talk.add_turn("one", "abc", tuple(b"abc"))
    talk.reset()
    assert talk.next_prompt("one") == first


# From a note


def saved(talk: Conversation, question: str, answer: tuple[int, ...], note: str = "") -> Manifest:
    """The agent of a conversation after a turn, as an engine keeps it."""
    prompt = talk.next_prompt(question)
    return Manifest(
        Scope(b"n" * 32, b"t" * 32),
        "a",
        (*prompt, *answer),
        prompt_tokens=len(prompt),
        note=note or talk.note(question),
    )


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_resumed_conversation_goes_on_as_if_it_had_never_ended(system: str | None) -> None:
    tokenizer = PlainTokenizer([b"ab"])
    talk = Conversation(tokenizer, system)
    talk.next_prompt("one")
    talk.add_turn("one", "x", tuple(b"x"))
    answer = (TWO_LETTERS, ord("c"), EOS)
    manifest = saved(talk, "two", answer)
    talk.add_turn("two", "abc", answer)
    again = Conversation(tokenizer)
    assert again.resume(manifest)
    assert again.messages == talk.messages
    assert again.next_prompt("three") == talk.next_prompt("three")
    again.reset()
    assert again.next_prompt("one") == Conversation(tokenizer, system).next_prompt("one")


@pytest.mark.parametrize(
    "note",
    [
        "null", "{", "[]", "{}", "[" * 100_000, '{"messages": 1}', '{"messages": []}',
        '{"messages": [1]}', '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 1}]}',
        '{"messages": [{"role": "user", "content": "a", "more": "b"}]}',
        '{"messages": [{"role": "assistant", "content": "a"}]}',
    ],
)  # fmt: skip
def test_a_note_of_another_shape_is_no_history(note: str) -> None:
    talk = Conversation(PlainTokenizer())
    manifest = saved(Conversation(PlainTokenizer()), "one", tuple(b"abc"), note)
    assert not talk.resume(manifest)
    assert talk.messages == []
    assert talk.next_prompt("two") == Conversation(PlainTokenizer()).next_prompt("two")


def test_a_conversation_cannot_go_on_with_another_system_message() -> None:
    manifest = saved(Conversation(PlainTokenizer(), "be brief"), "one", tuple(b"abc"))
    assert Conversation(PlainTokenizer(), "be brief").resume(manifest)
    with pytest.raises(InvalidRequestError, match="another system message"):
        Conversation(PlainTokenizer(), "be long").resume(manifest)


def test_the_embedded_model_has_a_template_whose_conversations_only_grow() -> None:
    _, tokenizer = load()
    talk = Conversation(tokenizer)
    seen: tuple[int, ...] = ()
    for answer in ("Hello! How can I help you?", "", "Your name is Zoë – \n\n or not"):
        prompt = talk.next_prompt("  What is my name?  ")
        assert prompt[: len(seen)] == seen
        tokens = (*tokenizer.encode(answer), *tokenizer.eos_token_ids)
        talk.add_turn("  What is my name?  ", answer, tokens)
        seen = (*prompt, *tokens)
    assert seen == tuple(tokenizer.render_chat(talk.messages, add_generation_prompt=False))


def test_a_model_without_a_template_is_recognised() -> None:
    assert has_chat_template(ByteTokenizer())
    assert not has_chat_template(CharTokenizer())
    with pytest.raises(InvalidRequestError):
        Conversation(CharTokenizer()).next_prompt("one")
