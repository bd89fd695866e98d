"""A request alone: its tokens, its text and its end."""

from __future__ import annotations

import pytest

from semantic.application.request import Phase, Request
from semantic.domain.value_objects import (
    FinishReason,
    SampledToken,
    SamplingParams,
    SequenceId,
    TokenLogprob,
)
from tests.support.fake_tokenizer import EOS, ByteTokenizer


def request(prompt: str = "prompt", max_tokens: int = 100, stop: tuple[str, ...] = ()) -> Request:
    tokenizer = ByteTokenizer()
    return Request(
        uid="u",
        number=0,
        agent_id="a",
        prompt=tuple(tokenizer.encode(prompt, add_special_tokens=False)),
        max_tokens=max_tokens,
        params=SamplingParams(stop=stop),
        eos_token_ids=tokenizer.eos_token_ids,
        detokenizer=tokenizer.detokenizer(),
    )


def say(of: Request, token: int) -> tuple[str, FinishReason | None]:
    return of.accept(SampledToken(SequenceId(0), token))


def say_all(of: Request, text: str) -> tuple[list[str], FinishReason | None]:
    """Feed `text` byte by byte, until the end."""
    pieces: list[str] = []
    for token in text.encode():
        piece, reason = say(of, token)
        pieces.append(piece)
        if reason is not None:
            return pieces, reason
    return pieces, None


def test_a_new_request_waits_and_has_said_nothing() -> None:
    of = request()
    assert (of.phase, of.text, of.generated, of.n_tokens) == (Phase.WAITING, "", [], 6)
    assert (of.to_prefill, of.max_total_tokens) == (5, 106)


def test_all_tokens_but_the_last_are_prefilled_in_chunks() -> None:
    of = request("abcdefg")
    chunks = []
    while of.to_prefill:
        chunk = of.next_chunk(2)
        chunks.append(bytes(chunk).decode())
        of.computed += len(chunk)
    assert chunks == ["ab", "cd", "ef"]
    assert of.next_chunk(2) == ()


def test_the_last_chunk_has_several_tokens() -> None:
    of = request("abcdefgh")
    assert bytes(of.next_chunk(6)) == b"abcde"
    of.computed = 5
    assert bytes(of.next_chunk(6)) == b"fg"
    of.computed = 6  # restored there
    assert bytes(of.next_chunk(6)) == b"g"


def test_a_preempted_request_prefills_what_it_said_too() -> None:
    of = request("ab")
    say_all(of, "xyz")
    assert (of.computed, of.to_prefill) == (5, 0)
    of.computed = 0
    assert bytes(of.next_chunk(99)) == b"abxy"
    assert bytes(of.tokens) == b"abxyz"


def test_text_comes_token_by_token() -> None:
    of = request()
    assert say_all(of, "hi!") == (["h", "i", "!"], None)
    assert of.text == "hi!"


def test_a_character_comes_when_it_is_whole() -> None:
    of = request()
    assert say_all(of, "é😀") == (["", "é", "", "", "", "😀"], None)


def test_an_end_token_ends_the_answer_without_text() -> None:
    of = request()
    say_all(of, "hi")
    assert say(of, EOS) == ("", "stop")
    assert (of.text, of.generated[-1]) == ("hi", EOS)


def test_the_last_token_allowed_ends_the_answer_at_its_length() -> None:
    of = request(max_tokens=3)
    assert say_all(of, "abcdef") == (["a", "b", "c"], "length")


def test_an_end_token_at_the_last_place_is_an_end() -> None:
    of = request(max_tokens=2)
    say(of, 97)
    assert say(of, EOS) == ("", "stop")


def test_a_stop_string_over_several_tokens_is_cut_out() -> None:
    of = request(stop=("END",))
    assert say_all(of, "one END two") == (["o", "n", "e", " ", "", "", ""], "stop")
    assert of.text == "one "


def test_text_held_back_comes_with_the_end_token() -> None:
    of = request(stop=("END",))
    say_all(of, "one EN")
    assert of.text == "one "
    assert say(of, EOS) == ("EN", "stop")
    assert of.text == "one EN"


def test_text_held_back_comes_at_the_length() -> None:
    of = request(stop=("END",), max_tokens=4)
    assert say_all(of, "abEN") == (["a", "b", "", "EN"], "length")


def test_text_held_back_comes_when_a_request_is_cut_off() -> None:
    of = request(stop=("END",))
    say_all(of, "abEN")
    assert of.end_text() == "EN"
    assert of.text == "abEN"


def test_half_a_character_at_the_length_becomes_a_replacement() -> None:
    of = request(max_tokens=2)
    assert say_all(of, "aé") == (["a", "�"], "length")


def test_half_a_character_before_an_end_token_becomes_a_replacement() -> None:
    of = request()
    say(of, "é".encode()[0])
    assert say(of, EOS) == ("�", "stop")


def test_a_stop_string_that_only_the_end_completes_still_cuts() -> None:
    of = request(max_tokens=3, stop=("b�",))
    assert say_all(of, "abé") == (["a", "", ""], "stop")
    assert of.text == "a"


@pytest.mark.parametrize("prompt", ["a", "ab"])
def test_a_request_that_said_nothing_has_no_end_text(prompt: str) -> None:
    assert request(prompt).end_text() == ""


def test_log_probabilities_are_kept_in_order() -> None:
    of = request()
    told = [TokenLogprob(97, -0.1), TokenLogprob(98, -0.2, ((98, -0.2),))]
    for one in told:
        of.accept(SampledToken(SequenceId(0), one.token, one))
    assert of.logprobs == told


def test_it_tells_which_stop_string_ended_the_answer() -> None:
    of = request(stop=("end", "halt"))
    assert say_all(of, "go on halt")[1] == "stop"
    assert of.stop_string == "halt"
    other = request(stop=("end", "halt"))
    assert say(other, EOS)[1] == "stop"
    assert other.stop_string is None


def test_a_token_with_an_error_is_the_last() -> None:
    of = request()
    say(of, ord("a"))
    assert of.accept(SampledToken(SequenceId(0), EOS, error="it failed")) == ("", "error")
    assert (of.text, of.error, of.generated) == ("a", "it failed", [ord("a"), EOS])


@pytest.mark.parametrize(
    ("n", "chunks"), [(1, []), (2, [2]), (129, [129]), (130, [129, 2]), (300, [129, 129, 44])]
)
def test_a_prompt_is_scored_in_chunks_that_nothing_changes(n: int, chunks: list[int]) -> None:
    of = request("x" * n)
    plain = Request(
        uid="u",
        number=0,
        agent_id="a",
        prompt=of.prompt,
        max_tokens=1,
        params=SamplingParams(prompt_logprobs=0),
        eos_token_ids=frozenset(),
        detokenizer=of.detokenizer,
    )
    found = []
    for _ in range(len(chunks)):
        assert plain.scoring
        chunk = plain.next_scored()
        found.append(len(chunk))
        plain.scores += [TokenLogprob(token, -1.0) for token in chunk[1:]]
        plain.computed += len(chunk) - 1
    assert found == chunks
    assert not plain.scoring
    assert (len(plain.scores), plain.to_prefill) == (n, 0)
    assert plain.scores[0] is None
