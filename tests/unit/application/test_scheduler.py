"""Whose prompt is next, and who is suspended."""

from __future__ import annotations

from semantic.application.request import Request
from semantic.application.scheduler import next_to_prefill, youngest
from semantic.domain.value_objects import SamplingParams


def request(number: int, left: int) -> Request[None]:
    """A request with `left` tokens to prefill."""
    return Request(
        uid=f"request-{number}",
        number=number,
        agent_id="a",
        prompt=(0,) * (left + 1),
        max_tokens=1,
        params=SamplingParams(),
        eos_token_ids=frozenset(),
        decode=str,
    )


def test_nobody_waits_when_there_is_nobody() -> None:
    assert next_to_prefill([], 0) is None
    assert next_to_prefill([], 3) is None
    assert youngest([]) is None


def test_the_prompt_with_the_least_left_goes_first() -> None:
    requests = [request(0, 900), request(1, 30), request(2, 500)]
    assert [next_to_prefill(requests, turn) for turn in range(3)] == [requests[1]] * 3


def test_what_is_left_counts_and_not_how_long_it_was() -> None:
    requests = [request(0, 900), request(1, 30)]
    requests[0].computed = 890
    assert next_to_prefill(requests, 0) is requests[0]


def test_of_two_alike_the_older_goes_first() -> None:
    requests = [request(5, 30), request(4, 30)]
    assert next_to_prefill(requests, 0) is requests[1]


def test_every_fourth_chunk_is_the_oldest_prompts() -> None:
    requests = [request(3, 30), request(1, 9000), request(2, 10)]
    turns = [next_to_prefill(requests, turn) for turn in range(8)]
    assert [one.number for one in turns if one] == [2, 2, 2, 1, 2, 2, 2, 1]


def test_a_stream_of_short_prompts_cannot_starve_a_long_one() -> None:
    long = request(0, 5000)
    turns = 0
    while long.to_prefill:
        chosen = next_to_prefill([long, request(turns + 1, 20)], turns)
        assert chosen is not None
        chosen.computed += len(chosen.next_chunk(100))
        turns += 1
    assert turns <= 4 * 50


def test_the_last_to_arrive_is_the_youngest() -> None:
    requests = [request(2, 1), request(7, 1), request(4, 1)]
    assert youngest(requests) is requests[1]
