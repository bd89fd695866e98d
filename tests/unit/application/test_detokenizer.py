"""Text in pieces equals text as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from semantic.application.request import StreamingDetokenizer
from tests.support.fake_tokenizer import BOS, EOS, ByteTokenizer

MERGED = ["é".encode(), "😀".encode()[:3], b"\x80", b"the ", "ñ".encode() + b"\xf0"]
MERGING = ByteTokenizer(MERGED)


class SpacedTokenizer:
    """Words that bring the space before them, which is dropped at the very beginning."""

    words = (" a", " the", "s", " ", "é", ".")

    def decode(self, tokens: Sequence[int]) -> str:
        text = "".join(self.words[token] for token in tokens)
        return text.removeprefix(" ")


def stream(of: StreamingDetokenizer, tokens: Sequence[int]) -> list[str]:
    return [*[of.push(token) for token in tokens], of.flush()]


@given(st.text(max_size=30))
def test_characters_split_over_tokens_come_whole(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(StreamingDetokenizer(tokenizer.decode), tokens)
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@given(st.lists(st.integers(0, MERGING.vocab_size - 1), max_size=30))
def test_any_tokens_at_all_read_as_decoded_together(tokens: list[int]) -> None:
    pieces = stream(StreamingDetokenizer(MERGING.decode), tokens)
    assert "".join(pieces) == MERGING.decode(tokens)


@given(st.lists(st.sampled_from([BOS, EOS, 97, 0xC3, 0xA9, 258, 259, 260, 262]), max_size=40))
def test_broken_characters_and_silent_tokens_read_as_decoded_together(tokens: list[int]) -> None:
    pieces = stream(StreamingDetokenizer(MERGING.decode), tokens)
    assert "".join(pieces) == MERGING.decode(tokens)


@given(st.lists(st.integers(0, 5), max_size=30))
def test_a_space_that_depends_on_what_precedes_is_right(tokens: list[int]) -> None:
    tokenizer = SpacedTokenizer()
    pieces = stream(StreamingDetokenizer(tokenizer.decode), tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)


@given(st.lists(st.integers(0, MERGING.vocab_size - 1), max_size=30))
def test_what_was_given_out_is_never_taken_back(tokens: list[int]) -> None:
    of = StreamingDetokenizer(MERGING.decode)
    given_out = ""
    for n, token in enumerate(tokens, 1):
        given_out += of.push(token)
        assert MERGING.decode(tokens[:n]).startswith(given_out)


def test_nothing_reads_as_nothing() -> None:
    of = StreamingDetokenizer(MERGING.decode)
    assert of.flush() == ""
    assert of.push(97) == "a"
    assert (of.flush(), of.flush()) == ("", "")


def test_a_long_text_is_not_decoded_again_from_its_beginning() -> None:
    decoded: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return MERGING.decode(tokens)

    text = b"a long text " * 50
    stream(StreamingDetokenizer(decode), list(text))
    assert max(decoded) <= 9
    assert len(decoded) <= 1.25 * len(text)
