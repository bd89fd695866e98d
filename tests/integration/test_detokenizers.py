"""Streamed text equals the tokenizer's own, for each kind of tokenizer that models have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Regex, decoders
from tokenizers import Tokenizer as Fast
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from semantic.adapters.mlx.model.provider import find_folder, load_tokenizer
from semantic.adapters.mlx.text.tokenizer import (
    HuggingFaceTokenizer,
    MLXTokenizer,
    bytes_of_tokens,
    plain_decode,
)
from semantic.application.request import ByteDetokenizer, StreamingDetokenizer
from semantic.domain.errors import InvalidRequestError
from tests.support.lanes import examples

pytestmark = pytest.mark.mlx

CORPUS = ["the red fox, the old river", "naïve — 日本語 ñandú", "x = {1: [2]}\n\tpass  # 😀👍🏽"]
TEXTS = st.sampled_from(CORPUS) | st.text(alphabet="a the,.red é😀👍🏽日本\n", max_size=30)
ADDED = [AddedToken("<|é|>", special=True), AddedToken("日本", special=True), AddedToken("a b")]


def _wrapped(fast: Fast, **options: object) -> MLXTokenizer:
    make = cast("Callable[..., PreTrainedTokenizerFast]", PreTrainedTokenizerFast)
    wrapper = TokenizerWrapper(make(tokenizer_object=fast, eos_token="<|end|>", **options))
    return MLXTokenizer(cast(HuggingFaceTokenizer, wrapper))


def _byte_level(*, clean: bool = False) -> MLXTokenizer:
    """Trained, so that its tokens end inside characters; with added tokens of any spelling."""
    fast = Fast(BPE())
    fast.pre_tokenizer = ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(CORPUS * 3, trainer)
    fast.add_tokens([*ADDED, AddedToken("<|end|>", special=True)])
    return _wrapped(fast, clean_up_tokenization_spaces=clean)


def _sentence_piece() -> MLXTokenizer:
    """Llama 2's kind: spaces are marks, unknown characters are bytes, the first space is cut."""
    letters = sorted({letter for text in CORPUS for letter in text if letter.isascii()})
    pieces = ["▁", "▁the", "▁red", "▁a", *letters, *(f"<0x{byte:02X}>" for byte in range(256))]
    unknown = {"<unk>": 0}
    vocabulary = unknown | {piece: number for number, piece in enumerate(pieces, 1)}
    fast = Fast(BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    fast.add_special_tokens([AddedToken("<|end|>", special=True)])
    return _wrapped(fast)


def _embedded() -> MLXTokenizer:
    return load_tokenizer(str(find_folder("semantic-tiny")))


BYTE_LEVEL: dict[str, Callable[[], MLXTokenizer]] = {
    "embedded": functools.cache(_embedded),
    "byte-level": functools.cache(_byte_level),
    "byte-level, told to clean": functools.cache(lambda: _byte_level(clean=True)),
}
KINDS = BYTE_LEVEL | {"sentence pieces": functools.cache(_sentence_piece)}


def streamed(tokenizer: MLXTokenizer, tokens: list[int], after: Sequence[int] = ()) -> str:
    stream = tokenizer.detokenizer(after)
    return "".join([*map(stream.push, tokens), stream.flush()])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60, thorough=1000))
@given(text=TEXTS, data=st.data())
def test_a_text_behind_another_is_the_rest_of_both(
    kind: str, text: str, data: st.DataObject
) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    at = data.draw(st.integers(0, len(tokens)))
    whole, before = tokenizer.decode(tokens), tokenizer.decode(tokens[:at])
    if before and whole.startswith(before) and not before.endswith("\ufffd"):
        assert streamed(tokenizer, tokens[at:], tokens[:at]) == whole.removeprefix(before)


def test_a_first_space_is_kept_behind_a_text_and_cut_behind_a_special_token() -> None:
    tokenizer = KINDS["sentence pieces"]()
    vocabulary = tokenizer.inner.get_vocab()
    the, red, end = (vocabulary[piece] for piece in ("▁the", "▁red", "<|end|>"))
    assert tokenizer.text_of(red) == " red"
    assert streamed(tokenizer, [red, the], [the]) == " red the"
    assert streamed(tokenizer, [red, the]) == "red the"
    assert streamed(tokenizer, [red, the], [the, end]) == "red the"
    assert tokenizer.text_of(vocabulary["<0xE2>"]) == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(60, thorough=1000))
@given(text=TEXTS)
def test_a_text_is_streamed_as_it_is_decoded(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, tokens) == tokenizer.inner.decode(tokens)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@settings(max_examples=examples(60, thorough=1000))
@given(data=st.data())
def test_any_tokens_are_streamed_as_they_are_decoded(kind: str, data: st.DataObject) -> None:
    """Bytes that are no text, added tokens, and tokens beyond the tokenizer's own, too."""
    tokenizer = BYTE_LEVEL[kind]()
    highest = len(tokenizer.inner.get_vocab()) + 3
    tokens = data.draw(st.lists(st.integers(0, highest), max_size=30))
    whole = tokenizer.inner.decode(tokens)
    assert streamed(tokenizer, tokens) == whole
    assert tokenizer.decode(tokens) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoding_takes_the_short_way(kind: str) -> None:
    """Byte-level tokenizers decode no token twice; all decode without the Python around them."""
    tokenizer = KINDS[kind]()
    wanted = ByteDetokenizer if kind in BYTE_LEVEL else StreamingDetokenizer
    assert type(tokenizer.detokenizer()) is wanted
    assert plain_decode(tokenizer.inner.decode) is not tokenizer.inner.decode


def test_a_token_of_a_long_answer_costs_as_much_as_one_of_a_short_one() -> None:
    looked_up: list[int] = []

    def bytes_of(token: int) -> bytes:
        looked_up.append(token)
        return b"\xf0\x9f"[token % 2 :]

    detokenizer = ByteDetokenizer(bytes_of)
    for token in range(1000):
        detokenizer.push(token)
    assert looked_up == list(range(1000))


class Other(PreTrainedTokenizerFast):
    """A tokenizer with a `decode` of its own."""

    def decode(self, *args: object, **options: object) -> str:
        return f"other than {args} {options}"


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_itself() -> None:
    fast = _byte_level()
    backend = cast(PreTrainedTokenizerFast, cast(TokenizerWrapper, fast.inner)).backend_tokenizer
    make = cast("Callable[..., PreTrainedTokenizerFast]", Other)
    own = make(tokenizer_object=backend, eos_token="<|end|>")
    decode = cast("Callable[[list[int]], str]", own.decode)
    assert bytes_of_tokens(decode) is None
    assert plain_decode(decode)([5]).startswith("other than ([5],)")


def test_a_tokenizer_that_drops_spaces_is_asked_itself() -> None:
    backend = Fast(WordLevel({"a": 0, ",": 1, "[UNK]": 2}, unk_token="[UNK]"))
    make = cast("Callable[..., PreTrainedTokenizerFast]", PreTrainedTokenizerFast)
    own = make(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    decode = cast("Callable[[list[int]], str]", own.decode)
    assert plain_decode(decode)([0, 1]) == own.decode([0, 1]) == "a,"


SQUARE = "cannot tokenize 60000 characters of one kind in a row"
PANIC = "cannot tokenize the text: PanicException: Onig: Regex search error"


@pytest.mark.parametrize(
    ("pattern", "text", "words"),
    [
        (r"\s+$", " " * 60_000 + "a", SQUARE),
        (r"\s+$", "word " * 9000 + " " * 60_000 + "a b", SQUARE.replace("60000", "60001")),
        ("a+$", "a" * 59_999 + "b", SQUARE),
        ("(a+)+$", "a" * 40 + "b", PANIC),
        ("(a+)+$", "a" * 9000 + "b", PANIC),
    ],
)
def test_a_pattern_that_backtracks_refuses_a_text_and_ends(
    pattern: str, text: str, words: str
) -> None:
    tokenizer = _byte_level()
    fast = cast(PreTrainedTokenizerFast, cast(TokenizerWrapper, tokenizer.inner))
    fast.backend_tokenizer.pre_tokenizer = Split(Regex(pattern), "isolated")
    with pytest.raises(InvalidRequestError, match=words):
        tokenizer.encode(text)
    assert tokenizer.encode("the red fox")


def test_long_runs_are_tokenized_by_tokenizers_that_take_time_by_their_length() -> None:
    tokenizer = _byte_level()
    for text in (" " * 60_000 + "a", "a" * 60_000, "\n" * 60_000 + "b", "日" * 20_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pauses", [(), (0,), (1,), (0, 1, 2), (4,), (0, 2, 4, 5)])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_pause_changes_no_decision_on_a_long_run(
    pauses: tuple[int, ...], *, is_slow: bool
) -> None:
    """A garbage collection of a large process takes as long as a slow tokenizer."""
    measured = [0.016 if is_slow else 0.007] * 4 + [0.001] * 3
    for number in pauses:
        measured[number] += 0.5
    times = chain.from_iterable((0.0, one) for one in measured)
    tokenizer = MLXTokenizer(_byte_level().inner, lambda: next(times, 0.0))
    text = "a" * 60_000
    if is_slow:
        with pytest.raises(InvalidRequestError, match=SQUARE):
            tokenizer.encode(text)
    else:
        assert tokenizer.decode(tokenizer.encode(text)) == text
