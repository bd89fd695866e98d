"""Whose prompt is next, and who is preempted."""

from __future__ import annotations

from semantic.application.engine.scheduler import PrefillOrder, RecentConcurrency, preemption_victim
from semantic.application.request import Request, StreamingDetokenizer
from semantic.domain.identity import Hints
from semantic.domain.value_objects import SamplingParams


def request(
    number: int, left: int, agent: str = "a", tenant: str = "", priority: int = 0
) -> Request:
    """A request with `left` tokens to prefill."""
    return Request(
        uid=f"request-{number}",
        number=number,
        agent_id=agent,
        prompt=(0,) * (left + 1),
        max_tokens=1,
        params=SamplingParams(),
        eos_token_ids=frozenset(),
        detokenizer=StreamingDetokenizer(str),
        tenant=tenant,
        hints=Hints(priority=priority),
    )


def turns_without_progress(requests: list[Request], n: int) -> list[int]:
    """The numbers of those chosen, while none advances."""
    turns: PrefillOrder = PrefillOrder()
    chosen = []
    for _ in range(n):
        one = turns.next(requests)
        assert one is not None
        turns.account(one, 0)
        chosen.append(one.number)
    return chosen


def give(turns: PrefillOrder, requests: list[Request], chunk: int) -> Request:
    """One chunk; whose it was."""
    one = turns.next([request for request in requests if request.to_prefill])
    assert one is not None
    n_tokens = len(one.next_chunk(chunk))
    one.computed += n_tokens
    turns.account(one, n_tokens)
    return one


def test_nobody_waits_when_there_is_nobody() -> None:
    turns: PrefillOrder = PrefillOrder()
    assert [turns.next([]) for _ in range(5)] == [None] * 5
    assert preemption_victim([]) is None


def test_the_prompt_with_the_least_left_goes_first() -> None:
    requests = [request(0, 900), request(1, 30), request(2, 500)]
    assert turns_without_progress(requests, 3) == [1, 1, 1]


def test_what_is_left_counts_and_not_how_long_it_was() -> None:
    requests = [request(0, 900), request(1, 30)]
    requests[0].computed = 890
    assert turns_without_progress(requests, 1) == [0]


def test_of_two_alike_the_older_goes_first() -> None:
    assert turns_without_progress([request(5, 30), request(4, 30)], 1) == [4]


def test_every_fourth_chunk_is_the_oldest_prompts() -> None:
    requests = [request(3, 30), request(1, 9000), request(2, 10)]
    assert turns_without_progress(requests, 8) == [2, 2, 2, 1, 2, 2, 2, 1]


def test_a_stream_of_short_prompts_cannot_starve_a_long_one() -> None:
    for agent in ("a", "another"):
        turns: PrefillOrder = PrefillOrder()
        long, n = request(0, 5000), 0
        while long.to_prefill:
            n += 1
            give(turns, [long, request(n, 20, agent)], 100)
        assert n <= 4 * 50


def test_no_stream_of_newcomers_can_starve_anybody() -> None:
    turns: PrefillOrder = PrefillOrder()
    long, n = [request(0, 2000, "a"), request(1, 3000, "b")], 2
    while any(one.to_prefill for one in long):
        n += 1
        give(turns, [*long, request(n, 20, f"newcomer {n}")], 100)
    assert n <= 2 + 4 * (20 + 30) * 2


def test_agents_with_long_prompts_share_what_a_stream_of_short_ones_leaves() -> None:
    turns: PrefillOrder = PrefillOrder()
    ann, bob = request(0, 2000, "ann"), request(1, 2000, "bob")
    for n in range(2, 60):
        give(turns, [ann, bob, request(n, 20, f"newcomer {n}")], 100)
        assert abs(ann.computed - bob.computed) <= 100
    assert ann.computed >= 600


def test_many_short_prompts_of_one_agent_count_together() -> None:
    """By its prompts alone the flood would be first, all of the three turns of four."""
    turns: PrefillOrder = PrefillOrder()
    ann, flood, n = request(0, 500, "ann"), [request(i, 100, "flood") for i in range(1, 5)], 5
    while ann.to_prefill:
        one = give(turns, [ann, *flood], 100)
        if one is not ann:
            flood = [*(other for other in flood if other is not one), request(n, 100, "flood")]
            n += 1
    given_to_flood = n - 5
    assert given_to_flood <= 5


def test_a_short_prompt_is_not_behind_what_its_tenants_others_had() -> None:
    turns: PrefillOrder = PrefillOrder()
    flood = [request(i, 300, "flood", "t") for i in range(4)]
    for _ in range(6):
        give(turns, flood, 100)
    ann = request(9, 100, "ann", "t")
    assert give(turns, [ann, *flood], 100) is ann


def test_of_a_tenants_prompts_the_highest_priority_goes_first_but_for_every_fourth_chunk() -> None:
    requests = [request(0, 30), request(1, 900, "b", priority=1), request(2, 20, "c", priority=-1)]
    assert turns_without_progress(requests, 8) == [1, 1, 1, 0, 1, 1, 1, 2]


def test_a_tenant_gains_no_chunk_of_another_by_priority() -> None:
    urgent, short = request(0, 900, "a", "x", priority=8), request(1, 30, "b", "x")
    requests = [urgent, short, request(2, 500, "c", "y")]
    assert turns_without_progress(requests, 3) == [2, 2, 2]


def test_a_prompt_has_the_priority_of_one_that_waits_for_it() -> None:
    leader, other = request(0, 900), request(1, 30, "b", priority=1)
    for tenant, first in (("", leader), ("other", other)):
        behind = [(request(2, 40, "c", tenant, priority=2), leader)]
        assert PrefillOrder().next([leader, other], behind) is first


def test_agents_of_the_same_name_of_two_tenants_are_two() -> None:
    turns: PrefillOrder = PrefillOrder()
    mine, theirs = request(0, 250, "ann", "me"), request(1, 260, "ann", "you")
    chosen = [give(turns, [mine, theirs], 100) for _ in range(3)]
    assert chosen == [mine, mine, mine]
    assert give(turns, [mine, theirs], 100) is theirs


def test_the_last_to_arrive_is_the_youngest() -> None:
    requests = [request(2, 1), request(7, 1), request(4, 1)]
    assert preemption_victim(requests) is requests[1]


def test_one_request_after_the_other_is_not_concurrent() -> None:
    recent = RecentConcurrency()
    assert not any(recent.observe(1, now) for now in (0.0, 1.0, 2.0))


def test_concurrency_is_expected_for_30_s_after_the_last_one() -> None:
    recent = RecentConcurrency()
    assert recent.observe(2, 10.0)
    assert recent.observe(1, 30.0)
    assert recent.observe(3, 59.0)
    assert recent.observe(1, 88.0)
    assert not recent.observe(1, 90.0)
    assert not recent.observe(0, 91.0)
