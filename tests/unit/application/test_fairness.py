"""A tenant that asks for much waits for it; no other does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.engine.fair_queue import FairQueue
from semantic.application.request import Request, StreamingDetokenizer
from semantic.domain.identity import Hints
from semantic.domain.value_objects import SamplingParams, TokenEvent
from tests.support.lanes import more
from tests.unit.application.world import World, completions, expected, text_of, world


def request(
    number: int, agent: str = "a", tenant: str = "", size: int = 1, priority: int = 0
) -> Request:
    """A request that just came; `size` is the length of its prompt."""
    return Request(
        uid=f"request-{number}",
        number=number,
        agent_id=agent,
        prompt=(0,) * size,
        max_tokens=1,
        params=SamplingParams(),
        eos_token_ids=frozenset(),
        detokenizer=StreamingDetokenizer(str),
        tenant=tenant,
        hints=Hints(priority=priority),
    )


def queue_of(*requests: Request) -> FairQueue:
    queue: FairQueue = FairQueue()
    for one in requests:
        queue.push(one)
    return queue


def taken(queue: FairQueue, running: list[Request], room: int = 1000) -> Request | None:
    """The next one that has at most `room` tokens; it runs then."""
    one = queue.take(running, lambda other: len(other.prompt) <= room)
    if one is not None:
        running.append(one)
    return one


def order(queue: FairQueue) -> list[int]:
    """All of them, each running until the end."""
    running: list[Request] = []
    while taken(queue, running) is not None:
        pass
    return [one.number for one in running]


# The queue alone


def test_nobody_has_a_turn_in_an_empty_queue() -> None:
    queue = queue_of()
    assert taken(queue, []) is None
    assert (len(queue), list(queue), queue.uids) == (0, [], frozenset())


def test_one_agents_requests_go_in_order_of_arrival() -> None:
    assert order(queue_of(request(2), request(0), request(1))) == [0, 1, 2]


def test_agents_take_turns() -> None:
    flood = [request(i, "flood") for i in range(5)]
    assert order(queue_of(*flood, request(5, "ann"), request(6, "bob"))) == [0, 5, 6, 1, 2, 3, 4]


def test_who_runs_least_goes_first() -> None:
    queue = queue_of(request(2, "a"), request(3, "b"), request(4, "c"))
    running = [request(0, "a"), request(1, "b"), request(9, "a")]
    numbers = [one.number for _ in range(3) if (one := taken(queue, running))]
    assert numbers == [4, 3, 2]


def test_tenants_take_turns_however_many_agents_they_have() -> None:
    many = [request(i, f"agent {i}", "many") for i in range(6)]
    few = [request(6, "ann", "few"), request(7, "ann", "few")]
    assert order(queue_of(*many, *few)) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_the_tenant_that_runs_least_goes_first() -> None:
    queue = queue_of(request(5, "ann", "many"), request(6, "bob", "few"))
    running = [request(0, "cy", "many"), request(1, "di", "many"), request(2, "ed", "few")]
    assert [one.number for _ in range(2) if (one := taken(queue, running))] == [6, 5]


def test_tenants_take_turns_where_nobody_runs_when_the_next_one_is_chosen() -> None:
    many = [request(i, f"agent {i}", "many") for i in range(4)]
    queue = queue_of(*many, *(request(i, "ann", "few") for i in (4, 5, 6)))
    chosen = [one.tenant for _ in range(6) if (one := taken(queue, []))]
    assert chosen == ["many", "few"] * 3


def test_a_higher_priority_goes_first_of_a_tenants_agents() -> None:
    low, usual, high = (request(i, f"agent {i}", priority=p) for i, p in enumerate((-1, 0, 1)))
    assert order(queue_of(low, usual, high, request(3, "agent 3"))) == [2, 1, 3, 0]


def test_a_higher_priority_goes_first_of_an_agents_requests() -> None:
    queue = queue_of(request(0), request(1, priority=1), request(2, priority=1), request(3))
    assert order(queue) == [1, 2, 0, 3]


def test_a_tenant_gains_nothing_over_others_by_priority() -> None:
    high = [request(i, f"agent {i}", "high", priority=8) for i in (1, 2, 3)]
    low = [request(i, f"agent {i}", "low", priority=-8) for i in (0, 4, 5)]
    assert order(queue_of(*high, *low)) == [0, 1, 4, 2, 5, 3]
    chosen = queue_of(*high, *low)
    assert [one.number for _ in range(6) if (one := taken(chosen, []))] == [0, 1, 4, 2, 5, 3]


def test_a_stream_of_a_higher_priority_does_not_starve_a_lower_one() -> None:
    queue = queue_of(request(0, "low"))
    for n in range(1, 300):
        queue.push(request(n, f"agent {n}", priority=1))
        one = taken(queue, [])
        assert one is not None
        if one.agent_id == "low":
            assert n > 256
            return
    raise AssertionError("low was never served")


def test_agents_of_one_name_of_two_tenants_are_two() -> None:
    queue = queue_of(request(0, "ann", "x"), request(1, "ann", "x"), request(2, "ann", "y"))
    assert order(queue) == [0, 2, 1]


@pytest.mark.parametrize("tenants", [False, True])
def test_a_stream_of_newcomers_does_not_starve_who_was_served_before(tenants: bool) -> None:
    queue = queue_of(request(0, "ann"), request(1, "ann"))
    assert taken(queue, []) is not None
    for n in range(2, 6):
        queue.push(request(n, f"newcomer {n}", f"tenant {n}" if tenants else ""))
        one = taken(queue, [])
        assert one is not None
        if one.agent_id == "ann":
            return
    raise AssertionError("ann was never served again")


def test_a_stream_of_an_agents_requests_does_not_starve_another() -> None:
    """With one place, where no request runs when the next one is chosen."""
    queue = queue_of(*(request(i, "flood") for i in range(50)))
    served = []
    for n in range(50, 60):
        queue.push(request(n, "ann"))
        served += [one.agent_id for _ in range(2) if (one := taken(queue, []))]
    assert Counter(served)["ann"] == 10


def test_the_preempted_come_back_first_and_nobody_passes_them() -> None:
    fresh, old, older = request(0, "fresh"), request(7, "old", size=9), request(3, "older", size=9)
    old.preemptions = older.preemptions = 1
    queue = queue_of(fresh, old, older)
    assert queue.first([]) is older
    assert taken(queue, [], room=5) is None
    assert [one.number for _ in range(3) if (one := taken(queue, []))] == [3, 7, 0]


def test_who_does_not_fit_is_passed_only_so_often() -> None:
    big = request(0, "big", size=100)
    queue = queue_of(big)
    passed = 0
    for n in range(1, 50):
        queue.push(request(n, f"small {n}"))
        if taken(queue, [], room=10) is None:
            break
        passed += 1
    assert passed == 8
    assert queue.first([request(99, "big")]) is big, "not even though its agent runs most"
    assert taken(queue, []) is big
    assert taken(queue, [], room=10) is not None, "then the others go on"


def test_who_has_no_turn_is_not_passed() -> None:
    """Else the many of an agent would all be waited for, by those that should not wait."""
    flood = [request(i, "flood", size=100) for i in range(20)]
    queue = queue_of(*flood)
    running = [request(99, "flood")]
    for n in range(20, 60):
        queue.push(request(n, f"small {n}"))
        assert taken(queue, running, room=10) is not None


def test_an_agents_own_requests_do_not_pass_each_other() -> None:
    queue = queue_of(request(0, "a", size=100), request(1, "a"))
    assert taken(queue, [], room=10) is None


def test_who_waits_no_more_has_no_turn() -> None:
    first, second = request(0), request(1)
    queue = queue_of(first, second)
    queue.remove(first)
    assert list(queue) == [second]
    assert queue.uids == {second.uid}
    assert order(queue) == [1]


def test_nothing_is_remembered_of_those_who_wait_for_nothing() -> None:
    queue = queue_of()
    for n in range(100):
        queue.push(request(n, f"agent {n % 30}", f"tenant {n % 7}", priority=n % 3 - 1))
        if n % 2:
            taken(queue, [])
    while taken(queue, []):
        pass
    assert (queue._places, queue._tenants, queue._order, queue._early) == ({}, {}, [], [])


sizes = st.sampled_from([1, 1, 1, 50, 100])
asks = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), sizes, st.integers(0, 3)), max_size=60
)


@given(asks=asks, places=st.integers(1, 4))
def test_everybody_gets_a_turn_in_bounded_time(
    asks: list[tuple[str, str, int, int]], places: int
) -> None:
    """Places of 100 tokens together; who runs ends in order. None waits longer than all that
    was there before, and a bounded number of those that came later."""
    queue: FairQueue = FairQueue()
    running: list[Request] = []
    waits: dict[int, int] = {}
    ahead: dict[int, int] = {}

    def admit() -> None:
        while len(running) < places:
            room = 100 - sum(len(one.prompt) for one in running)
            one = taken(queue, running, room)
            if one is None:
                assert running or not queue, "there is room and no request gets it"
                return
            waits.pop(one.number)
            for other in waits:
                waits[other] += 1

    for number, (agent, tenant, size, ends) in enumerate(asks):
        ahead[number] = len(queue)
        waits[number] = 0
        queue.push(request(number, agent, tenant, size))
        del running[:ends]
        admit()
        agents = len({(a, t) for a, t, _, _ in asks})
        for waiting, passed in waits.items():
            # Between two of its own, each other agent has a turn or two; and eight may pass.
            assert passed <= (ahead[waiting] + 1) * (2 * agents + 8) + places * agents
    while queue:
        del running[:1]
        admit()
    assert waits == {}


@dataclass(eq=False)
class Waiting:
    """A request of `SortedQueue`."""

    request: Request
    arrived: int
    passed: int = 0

    @property
    def rank(self) -> int:
        return 0 if self.request.preemptions else 1 if self.passed >= 8 else 2


class SortedQueue:
    """The order that `FairQueue` describes, by sorting all requests each time."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.served: dict[tuple[str, ...], int] = {}
        self.admitted = 0

    def push(self, request: Request) -> None:
        self.waiting.append(Waiting(request, self.admitted))
        self.waiting.sort(key=lambda one: one.request.number)

    def remove(self, request: Request) -> None:
        self.waiting = [one for one in self.waiting if one.request is not request]
        waiting = {key for one in self.waiting for key in keys(one.request)}
        self.served = {key: at for key, at in self.served.items() if key in waiting}

    def in_order(self, running: Sequence[Request]) -> list[Waiting]:
        n_running = Counter(key for one in running for key in keys(one))
        firsts: dict[tuple[object, ...], Waiting] = {}
        arrived: dict[str, int] = {}
        for one in self.waiting:
            firsts.setdefault((one.rank, one.request.tenant, one.request.agent_id), one)
            arrived.setdefault(one.request.tenant, one.arrived)

        def position(one: Waiting) -> tuple[int, ...]:
            (tenant, agent), number = keys(one.request), one.request.number
            if one.rank < 2:
                return one.rank, number
            since = max(self.served.get(tenant, 0), arrived[one.request.tenant])
            own = max(self.served.get(agent, 0), one.arrived)
            return one.rank, n_running[tenant], since, n_running[agent], own, number

        return sorted(firsts.values(), key=position)

    def take(self, running: Sequence[Request], admit: Callable[[Request], bool]) -> Request | None:
        tried: list[Waiting] = []
        for one in self.in_order(running)[:8]:
            if admit(one.request):
                for earlier in tried:
                    earlier.passed += 1
                self.admitted += 1
                self.served |= dict.fromkeys(keys(one.request), self.admitted)
                self.remove(one.request)
                return one.request
            if one.rank < 2:
                return None
            tried.append(one)
        return None


def keys(one: Request) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of its tenant and of its agent."""
    return (one.tenant,), (one.tenant, one.agent_id)


def fits(room: int, one: Request) -> bool:
    return len(one.prompt) <= room


calls = st.one_of(
    st.tuples(st.sampled_from("abcdefghijkl"), st.sampled_from("xyz"), sizes, st.booleans()),
    st.integers(0, 120),  # room
    st.sampled_from(["end", "preempt", "cancel"]),
)


@given(calls=st.lists(calls, max_size=100))
def test_the_order_is_that_of_sorting_all_requests(
    calls: list[tuple[str, str, int, bool] | int | str],
) -> None:
    queue, model = FairQueue(), SortedQueue()
    running: list[Request] = []
    for number, call in enumerate(calls):
        if isinstance(call, tuple):
            agent, tenant, size, preempted = call
            one = request(number, agent, tenant, size)
            one.preemptions = preempted and number % 8 == 0
            queue.push(one)
            model.push(one)
        elif isinstance(call, int):
            admitted = queue.take(running, partial(fits, call))
            assert admitted is model.take(running, partial(fits, call))
            running += [] if admitted is None else [admitted]
        elif call == "cancel" and queue:
            one = list(queue)[number % len(queue)]
            queue.remove(one)
            model.remove(one)
        elif running and call != "cancel":
            one = running.pop(number % len(running))
            if call == "preempt":
                one.preemptions += 1
                queue.push(one)
                model.push(one)
        if queue:
            assert queue.first(running) is model.in_order(running)[0].request


class Number(int):
    """Counts how often two are compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Number.compared += 1
        return int(self) < int(other)


@pytest.mark.parametrize("by", ["agent", "tenant", "number"])
def test_an_admission_does_not_look_at_all_requests(by: str) -> None:
    queue = queue_of()
    for i in range(1000):
        agent, tenant = f"a{i * (by == 'agent')}", f"t{i * (by == 'tenant')}"
        one = request(i, agent, tenant)
        one.number = Number(i)
        queue.push(one)
    Number.compared = 0
    for _ in range(10):
        assert taken(queue, [request(1001, "a5", "t5")]) is not None
    assert 0 < Number.compared <= 10 * 60


# The engine


def test_a_flood_does_not_hold_up_another_agent() -> None:
    of = world("full", max_batch=2)
    for i in range(20):
        of.engine.submit("flood", text_of(i, 20), None, 10)
    of.engine.step_once()
    ann = of.engine.submit("ann", text_of(50, 20), None, 10)
    ends = [done.uid for done in of.finish()]
    assert ends.index(ann) <= 2 + 1


def test_one_tenants_flood_of_agents_does_not_hold_up_another_tenant() -> None:
    of = world("full", max_batch=2)
    for i in range(20):
        of.engine.submit(f"agent {i}", text_of(i, 20), None, 10, tenant="flood")
    of.engine.step_once()
    own = [of.engine.submit("ann", text_of(i, 20), None, 10, tenant="own") for i in (50, 51)]
    ends = [done.uid for done in of.finish()]
    first, second = (ends.index(uid) for uid in own)
    assert (first <= 3, second <= 5) == (True, True)


def test_no_tenant_fills_a_shared_batch_with_answers_alone() -> None:
    of = world("full")
    of.engine.share(lambda: False, itertools.count(), by_tenants=True)
    for i in range(20):
        of.engine.submit(f"agent {i}", text_of(i, 20), None, 100, tenant="flood")
    for _ in range(40):
        of.engine.step_once()
    assert len(of.engine._scheduler.running) == of.max_batch - 1
    own = of.engine.submit("ann", text_of(50, 20), None, 1, tenant="own")
    events = [event for _ in range(3) for event in of.engine.step_once()]
    assert own in {done.uid for done in completions(events)}
    assert len(of.finish()) == 20


def test_a_batch_that_is_not_shared_has_every_place_for_one_tenant() -> None:
    of = world("full")
    for i in range(20):
        of.engine.submit(f"agent {i}", text_of(i, 20), None, 100)
    for _ in range(40):
        of.engine.step_once()
    assert len(of.engine._scheduler.running) == of.max_batch


def test_what_was_preempted_goes_on_whatever_its_tenant_has() -> None:
    of = queue_of(request(1, "a", "flood"), request(2, "b", "own"), request(3, "c", "flood"))
    preempted = request(4, "d", "flood")
    preempted.preemptions = 1
    of.push(preempted)
    order = [of.take([], lambda _: True, lambda tenant: tenant != "flood") for _ in range(3)]
    assert [one and one.number for one in order] == [4, 2, None]


def test_a_large_request_comes_to_its_turn_while_small_ones_keep_coming() -> None:
    of = world("full", columns=6)
    of.engine.submit("keeper", text_of(0, 300), None, 60)
    of.engine.step_once()
    prompt = text_of(1, 1200)
    large = of.engine.submit("large", prompt, None, 4)
    seen: set[str] = set()
    answers: dict[str, tuple[int, ...]] = {}
    for n in range(400):
        of.engine.submit(f"small {n}", text_of(2 + n % 5, 20), None, 8)
        events = of.engine.step_once()
        of.check(opened=True)
        if large in of.engine.waiting:
            seen |= {event.uid for event in events}
        answers |= {done.uid: done.tokens for done in completions(events)}
        if large in answers:
            break
    assert answers[large] == expected(of.spec, prompt, 4).tokens
    assert len(seen) == 1 + 8, "only so many passed it"


TOKEN, DECODE_STEP = 0.001, 0.02
"""Seconds, of the fake."""

CHUNK = max(5 * DECODE_STEP, 0.25)
"""Seconds for which a prompt may have to wait for a long one: the target gap here."""


def short_behind_long(
    n_tokens: int, n_long: int, steps: int, n_talkers: int
) -> tuple[World, list[str], float]:
    """A prompt of `n_tokens` comes when long ones have been computed for a few steps: the long
    ones, and seconds until its first token."""
    of = world("full", columns=400, largest_chunk=2048)
    for uid in decoders(of, n_talkers or 1):
        if not n_talkers:
            of.engine.cancel(uid)
    long = [of.engine.submit(f"reader {i}", text_of(20 + i, 8000), None, 2) for i in range(n_long)]
    of.engine.submit("another", text_of(40, 20), None, 2)
    for _ in range(4 + steps):
        of.engine.step_once()
    short = of.engine.submit("short", text_of(9, n_tokens), None, 3)
    return of, long, first_token_after(of, short)


def first_token_after(of: World, uid: str) -> float:
    """Seconds until the request's first token."""
    begin = of.clock()
    for _ in range(1, 200):
        events = of.engine.step_once()
        if any(isinstance(event, TokenEvent) and event.uid == uid for event in events):
            return of.clock() - begin
    raise AssertionError("it never spoke")


def decoders(of: World, n: int) -> list[str]:
    """`n` requests in the middle of their answers."""
    uids = [of.engine.submit(f"talker {i}", text_of(i, 20), None, 500) for i in range(n)]
    for _ in range(30):
        of.engine.step_once()
    return uids


@pytest.mark.parametrize("n_tokens", [60, *more(20, 120)])
@pytest.mark.parametrize("n_long", [1, 3])
@pytest.mark.parametrize("steps", [0, 3, *more(1, 2)])
@pytest.mark.parametrize("n_talkers", [0, 4])
def test_a_short_prompt_speaks_within_the_target_gap_beside_its_own_prefill(
    n_tokens: int, n_long: int, steps: int, n_talkers: int
) -> None:
    of, long, first_token = short_behind_long(n_tokens, n_long, steps, n_talkers)
    assert first_token < n_tokens * TOKEN + CHUNK + DECODE_STEP
    assert {r.uid for r in of.engine._scheduler.running if r.to_prefill} == set(long), (
        "still computed"
    )
    assert all(done.finish_reason == "length" for done in of.finish())


@pytest.mark.parametrize("n_at_once", [1, 2, 3, 4])
def test_a_stream_of_short_prompts_that_share_a_pass_does_not_starve_a_long_one(
    n_at_once: int,
) -> None:
    of = world("full", columns=400)
    long = of.engine.submit("reader", text_of(0, 4000), None, 2)
    reader = next(one for one in of.engine.requests if one.uid == long)
    for step in range(300):
        for i in range(n_at_once):
            of.engine.submit(f"short {step} {i}", text_of(step + i + 1, 20), None, 1)
        of.engine.step_once()
        if not reader.to_prefill:
            break
    assert not reader.to_prefill, f"{reader.computed} of 4,000 tokens after 300 steps"


def test_a_prompt_of_middle_length_is_not_held_up_much_more() -> None:
    _, _, first_token = short_behind_long(n_tokens=700, n_long=2, steps=1, n_talkers=3)
    assert first_token < 2 * (700 * TOKEN + CHUNK)


def spread(counts: Sequence[int]) -> int:
    return max(counts) - min(counts)


def test_agents_that_flood_alike_are_served_alike() -> None:
    of = world("full", max_batch=3)
    for n in range(30):
        for agent in ("ann", "bob", "cy"):
            for _ in range({"ann": 1, "bob": 2, "cy": 3}[agent]):
                of.engine.submit(agent, text_of(n, 20), None, 5)
    served: Counter[str] = Counter()
    while len(served) < 3 or min(served.values()) < 25:
        for done in completions(of.engine.step_once()):
            served[done.agent_id] += 1
        if sum(served.values()) > 9:
            assert spread(list(served.values())) <= 3
