"""Every prompt of a conversation begins with all tokens the model has seen in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from semantic.application.chat.transcript import message_of, transcript_of
from semantic.bootstrap import load
from semantic.cli.conversation import Message, has_chat_template, message, next_prompt
from semantic.domain.block_hash import Scope
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import Manifest
from semantic.ports.generation import Tokenizer
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


def saved(tokenizer: Tokenizer, answer: bytes | tuple[int, ...], *asked: Message) -> Manifest:
    """The agent of a conversation after its last answer, as an engine keeps it."""
    prompt = tokenizer.render_chat(asked)
    note = transcript_of([message_of(one) for one in asked])
    scope, tokens = Scope(b"n" * 32, b"t" * 32), (*prompt, *answer)
    return Manifest(scope, "a", tokens, prompt_tokens=len(prompt), note=note)


BRIEF, ONE, TWO = message("system", "be brief"), message("user", "one"), message("user", "two")


@pytest.mark.parametrize("asked", [(ONE,), (BRIEF, ONE), (ONE, message("assistant", "x"), TWO)])
def test_a_prompt_begins_with_the_tokens_that_the_agent_has(asked: tuple[Message, ...]) -> None:
    tokenizer = PlainTokenizer([b"ab"])
    agent = saved(tokenizer, (TWO_LETTERS, ord("c"), EOS), *asked)
    prompt = next_prompt(tokenizer, agent, "more")
    assert prompt is not None
    assert prompt[: len(agent.token_ids)] == agent.token_ids
    messages = [*asked, message("assistant", "abc"), message("user", "more")]
    assert tokenizer.decode(prompt) == tokenizer.decode(tokenizer.render_chat(messages))


def test_tokens_that_no_text_shows_are_kept() -> None:
    tokenizer = ByteTokenizer([b"ab"])
    prompt = next_prompt(tokenizer, saved(tokenizer, (TWO_LETTERS,), ONE), "two")
    rendered = tokenizer.render_chat([ONE, message("assistant", "ab"), TWO])
    assert prompt == tuple(rendered)
    assert rendered[0] == BOS


def test_a_template_that_rewrites_the_past_wins() -> None:
    tokenizer = ForgetfulTokenizer()
    prompt = next_prompt(tokenizer, saved(tokenizer, b"abc", ONE), "two")
    assert prompt == tuple(tokenizer.render_chat([ONE, TWO]))


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
    tokenizer = PlainTokenizer()
    agent = replace(saved(tokenizer, b"abc", ONE), note=note)
    assert next_prompt(tokenizer, agent, "two") is None


def test_the_embedded_model_has_a_template_whose_conversations_only_grow() -> None:
    _, tokenizer = load()
    question = message("user", "  What is my name?  ")
    messages = [question]
    for said in ("Hello! How can I help you?", "", "Your name is Zoë – \n\n or not"):
        answer = (*tokenizer.encode(said), *tokenizer.eos_token_ids)
        agent = saved(tokenizer, answer, *messages)
        prompt = next_prompt(tokenizer, agent, question["content"])
        assert prompt is not None
        assert prompt[: len(agent.token_ids)] == agent.token_ids
        messages += [message("assistant", said), question]


def test_a_model_without_a_template_is_recognised() -> None:
    assert has_chat_template(ByteTokenizer())
    assert not has_chat_template(CharTokenizer())
    agent = saved(ByteTokenizer(), b"abc", ONE)
    with pytest.raises(InvalidRequestError):
        next_prompt(CharTokenizer(), agent, "one")
