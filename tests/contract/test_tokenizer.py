"""What every `Tokenizer` does: text to ids and back, statelessly."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.ports.generation import Tokenizer
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_tokenizer import ByteTokenizer
from tests.support.lanes import examples


@functools.cache
def _embedded() -> Tokenizer:
    from semantic.adapters.mlx.model.provider import MLXModelProvider

    return MLXModelProvider().load_model()[1]


def embedded() -> Tokenizer:
    """The tokenizer of the model that ships with the package."""
    try:
        return _embedded()
    except ModelNotFoundError as error:
        pytest.skip(f"the embedded model is not here: {error}")


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "characters": lambda: CharTokenizer(frozenset({3})),
    "bytes": ByteTokenizer,
    "merged bytes": lambda: ByteTokenizer(["é".encode(), "😀".encode()[:3], b"the "]),
    "embedded model": embedded,
}
TEXTS = ["Hello, world.", "a", " leading and trailing ", "x = {1: [2, 3]}", "two  spaces"]


EMBEDDED = pytest.param("embedded model", marks=pytest.mark.mlx)
"""Its adapter imports MLX."""


@pytest.fixture(params=[EMBEDDED if name == "embedded model" else name for name in TOKENIZERS])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[str(request.param)]()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_the_same_text_always_gives_the_same_ids(tokenizer: Tokenizer, text: str) -> None:
    first = tokenizer.encode(text)
    tokenizer.encode("something else")
    tokenizer.decode([1, 2])
    assert tokenizer.encode(text) == first


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_whole_numbers_from_zero(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert isinstance(ids, list)
    assert ids
    assert all(type(token) is int and token >= 0 for token in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_special_tokens_only_surround_the_text(tokenizer: Tokenizer, text: str) -> None:
    plain = tokenizer.encode(text, add_special_tokens=False)
    special = tokenizer.encode(text)
    at = next(i for i in range(len(special)) if special[i : i + len(plain)] == plain)
    assert len(special) - len(plain) <= 2
    assert at <= 1


def test_nothing_is_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.decode([]) == ""


def test_the_end_tokens_are_a_fixed_set_of_ids(tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer.eos_token_ids, frozenset)
    assert tokenizer.eos_token_ids == tokenizer.eos_token_ids
    assert all(type(token) is int for token in tokenizer.eos_token_ids)
    assert tokenizer.eos_token_ids


@pytest.mark.parametrize("name", ["bytes", "merged bytes", EMBEDDED])
def test_half_a_character_becomes_a_replacement(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode("😀", add_special_tokens=False)
    if len(ids) > 1:
        assert tokenizer.decode(ids[:-1]).endswith("�")
    assert tokenizer.decode(ids) == "😀"


def test_a_conversation_is_rendered_or_refused(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Where is the key?"}]
    try:
        ids = tokenizer.render_chat(messages)
    except InvalidRequestError as error:
        assert "chat template" in str(error)  # noqa: PT017
        return
    shorter = tokenizer.render_chat(messages, add_generation_prompt=False)
    assert "Where is the key?" in tokenizer.decode(ids)
    assert ids[: len(shorter)] == shorter
    assert len(ids) > len(shorter)


@pytest.mark.parametrize("name", ["bytes", EMBEDDED])
def test_a_longer_conversation_begins_with_the_shorter(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    first = [{"role": "user", "content": "One."}]
    more = [*first, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "3"}]
    shorter = tokenizer.render_chat(first, add_generation_prompt=False)
    longer = tokenizer.render_chat(more, add_generation_prompt=False)
    assert longer[: len(shorter)] == shorter


@pytest.mark.mlx
@settings(max_examples=examples(60, thorough=500))
@given(
    name=st.sampled_from(["bytes", "merged bytes", "embedded model"]),
    text=st.text(alphabet="ab é😀ñ\n.", max_size=20),
)
def test_a_stream_of_tokens_reads_as_the_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = tokenizer.detokenizer()
    pieces = [stream.push(token) for token in ids] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)
