"""Special tokens in texts, for tokenizers of several kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from semantic.adapters.mlx.text.tokenizer import Escaper, SpecialTokens

SPECIAL = ("<s>", "<|end|>", "<|e")
MARKS = ("<tool>", "</tool>")


def _letters() -> Tokenizer:
    letters = [chr(byte) for byte in range(33, 127)] + ["▁", "\n", "Ġ", "Ċ", "é"]
    return Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))


def plain() -> Tokenizer:
    tokenizer = _letters()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = _letters()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def prepending() -> Tokenizer:
    tokenizer = _letters()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": plain,
    "space before the first": functools.partial(metaspace, "first"),
    "space before each": functools.partial(metaspace, "always"),
    "space by the normalizer": prepending,
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKS])
    return tokenizer


@functools.cache
def special_tokens_of(kind: str) -> SpecialTokens:
    tokenizer = tokenizer_of(kind)

    def numbered(texts: tuple[str, ...]) -> dict[str, int]:
        numbers = tokenizer.get_vocab()
        return {text: numbers[text] for text in texts}

    return SpecialTokens(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        numbered(SPECIAL),
        numbered(MARKS),
    )


def encoded(kind: str, text: str, *, marks: bool = True) -> tuple[str, list[str]]:
    """A user's text after <s> and before </tool>, decoded, and the special tokens in it."""
    tokenizer, special_tokens = tokenizer_of(kind), special_tokens_of(kind)
    escaper = Escaper(special_tokens, [text])
    tokens = special_tokens.encode(f"<s>{escaper(text, marks=marks)}</tool>", escaper)
    added = tokenizer.get_added_tokens_decoder()
    special = [added[token].content for token in tokens if token in added]
    return str(tokenizer.decode(tokens, skip_special_tokens=False)), special


texts = st.lists(
    st.sampled_from(
        [*SPECIAL, *MARKS, "a", "bc", " ", "<", "|", "hiddentext", "hiddentext0z", "1z"]
    )
).map("".join)


@given(st.sampled_from(list(KINDS)), texts)
def test_no_text_becomes_a_special_token(kind: str, text: str) -> None:
    assert encoded(kind, text)[1] == ["<s>", "</tool>"]


@given(texts)
def test_every_character_is_kept(text: str) -> None:
    assert encoded("bytes", text)[0] == f"<s>{text}</tool>"


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_hidden_token_adds_no_space(kind: str) -> None:
    assert "a<|end|>b<tool>c" in encoded(kind, "a<|end|>b<tool>c")[0]


@pytest.mark.parametrize("kind", list(KINDS))
def test_marks_are_left_to_those_who_may_write_them(kind: str) -> None:
    assert encoded(kind, "a<tool>b<|end|>", marks=False)[1] == ["<s>", "<tool>", "</tool>"]


@given(st.sampled_from(list(KINDS)), st.text(alphabet="ab \n", max_size=8))
def test_a_text_without_special_tokens_is_encoded_in_one_piece(kind: str, text: str) -> None:
    tokenizer, special_tokens = tokenizer_of(kind), special_tokens_of(kind)
    whole = tokenizer.encode(f"<s>{text}</tool>", add_special_tokens=False).ids
    escaper = Escaper(special_tokens, [text])
    assert special_tokens.encode(f"<s>{escaper(text, marks=True)}</tool>", escaper) == list(whole)
