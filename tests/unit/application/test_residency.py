"""Which models are in memory: the policy, on a virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from semantic.application.models.residency import Change, Patience, Residency, Ticket, Weights
from semantic.domain.errors import InvalidRequestError

LOAD = 4.0
EAGER = Patience(residence=0.0, linger=0.0)


@dataclass
class Server:
    """Loads take `LOAD` seconds, one at a time; requests take what they say. No threads."""

    of: Residency
    now: float = 0.0
    loads: Counter[str] = field(default_factory=Counter)
    too_large: Counter[str] = field(default_factory=Counter)
    waits: dict[str, list[float]] = field(default_factory=dict)
    true: dict[str, int] = field(default_factory=dict)
    """What weights take that are estimated wrongly."""
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _waiting: list[tuple[Ticket, float, Callable[[], None]]] = field(default_factory=list)
    _is_busy: bool = False

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), what))

    def ask(self, name: str, seconds: float, then: Callable[[], None] = lambda: None) -> None:
        """A request that uses a model for so long."""
        self._waiting.append((self.of.wait(name, self.now), seconds, then))

    def run(self, until: float) -> None:
        while True:
            self._settle()
            times = [self._events[0][0]] if self._events else []
            wake = None if self._is_busy else self.of.next_time(self.now)
            times += [] if wake is None else [wake]
            if not times or min(times) > until:
                self.now = until
                return
            self.now = min(times)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()

    def _settle(self) -> None:
        """Make what can be made at this moment."""
        while True:
            self._begin()
            change = None if self._is_busy else self.of.next_change(self.now)
            self._begin()
            if change is None:
                return
            self.of.changing(change)
            weights = self._measured(change.name)
            room = self.of.room_for(change.name)
            if change.loads and weights is not None and weights.n_bytes > room:
                self.too_large[change.name] += 1  # seen before they are read
                self.of.unloaded(change.name)
                self.of.resize(change.name, 0, weights)
            elif change.loads:
                self._is_busy = True
                self.loads[change.name] += 1
                assert self.of.used <= self.of.capacity
                self.at(self.now + LOAD, lambda name=change.name: self._loaded(name))  # type: ignore[misc]
            else:
                assert not self.of.requests(change.name)[0], "unloaded while it was used"
                self.of.unloaded(change.name)

    def _loaded(self, name: str) -> None:
        self._is_busy = False
        self.of.loaded(name, self.now, LOAD, self._measured(name))
        assert self.of.used <= self.of.capacity

    def _measured(self, name: str) -> Weights | None:
        return Weights(name, self.true[name]) if name in self.true else None

    def _begin(self) -> None:
        for one in tuple(self._waiting):
            ticket, seconds, then = one
            if self.of.is_open(ticket.name):
                self._waiting.remove(one)
                self.of.leave(ticket)
                self.of.begin(ticket.name, self.now)
                self.waits.setdefault(ticket.name, []).append(self.now - ticket.since)
                self.at(self.now + seconds, lambda n=ticket.name, t=then: self._end(n, t))  # type: ignore[misc]

    def _end(self, name: str, then: Callable[[], None]) -> None:
        self.of.end(name, self.now)
        then()


def server(capacity: int = 2, patience: Patience | None = None, **need: int) -> Server:
    of = Residency(capacity, patience)
    for name, n_bytes in (need or {"a": 1, "b": 1, "c": 1}).items():
        of.add(name, n_bytes)
    return Server(of)


def client(on: Server, name: str, seconds: float, pause: float) -> None:
    """Sends its next request `pause` after the last answer, for ever."""
    on.ask(name, seconds, lambda: on.at(on.now + pause, lambda: client(on, name, seconds, pause)))


# --- what is unloaded -------------------------------------------------------------------------


def test_what_fits_is_loaded_once_however_many_wait() -> None:
    one = server()
    for _ in range(10):
        one.ask("a", 1.0)
    one.run(100)
    assert one.loads == {"a": 1}
    assert one.of.state("a") == "loaded", "it stays until its memory is needed"


def test_the_least_recently_used_makes_room() -> None:
    one = server()
    for i, name in enumerate("abac"):
        one.at(i * 50.0, lambda name=name: one.ask(name, 1.0))  # type: ignore[misc]
    one.run(400)
    assert [one.of.state(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]


def test_nothing_is_unloaded_without_need() -> None:
    one = server(4, big=3, small=1, other=1)
    one.ask("small", 1.0)
    one.at(20, lambda: one.ask("big", 1.0))
    one.at(50, lambda: one.ask("other", 1.0))
    one.run(90)
    assert one.loads == {"small": 1, "big": 1, "other": 1}
    assert [one.of.state(n) for n in ("small", "big", "other")] == ["unloaded", "loaded", "loaded"]


def test_a_pinned_model_stays_and_one_that_is_used_is_never_unloaded() -> None:
    of = Residency(2)
    of.add("pinned", 1, pinned=True, ttl=1.0)
    of.add("busy", 1)
    of.add("wanted", 1)
    one = Server(of)
    one.ask("pinned", 1.0)
    one.ask("busy", 500.0)
    one.at(20, lambda: one.ask("wanted", 1.0))
    one.run(400)
    assert [of.state(n) for n in ("pinned", "busy", "wanted")] == ["loaded", "loaded", "unloaded"]
    one.run(600)
    assert [of.state(n) for n in ("pinned", "busy", "wanted")] == ["loaded", "unloaded", "loaded"]


def test_an_idle_model_is_unloaded_after_its_time_and_each_request_renews_it() -> None:
    of = Residency(2)
    of.add("a", 1, ttl=10.0)
    one = Server(of)
    for when in (0.0, 9.0, 18.0):
        one.at(when, lambda: one.ask("a", 1.0))
    one.run(28.9)
    assert of.state("a") == "loaded"
    assert of.expires("a") == pytest.approx(29.0)
    one.run(29.1)
    assert of.state("a") == "unloaded"
    of.keep("a", None)
    one.ask("a", 1.0)
    one.run(10_000)
    assert of.state("a") == "loaded"
    of.keep("a", 0.0)
    one.run(10_001)
    assert of.state("a") == "unloaded"


def test_an_operator_unloads_a_pinned_model_when_its_requests_have_ended() -> None:
    of = Residency(2)
    of.add("a", 1, pinned=True)
    one = Server(of)
    one.ask("a", 100.0)
    one.run(10)
    of.unload("a")
    assert not of.is_open("a")
    one.ask("a", 1.0)
    one.run(50)
    assert of.requests("a") == (1, 1)
    one.run(105)
    assert (of.state("a"), one.loads["a"]) == ("loading", 2), "for the one that came meanwhile"
    one.run(200)
    assert of.requests("a") == (0, 0)


# --- shared weights ---------------------------------------------------------------------------


def shared_weights(capacity: int) -> Server:
    """A base of 5 for its weights and 1 besides, two adapters of 2 and 3, and another model."""
    of = Residency(capacity)
    for name, n_bytes in (("base", 1), ("x", 2), ("y", 3)):
        of.add(name, n_bytes, weights=Weights("base", 5))
    of.add("other", 6, weights=Weights("other", 0))
    return Server(of)


def test_weights_that_models_share_count_once_and_stay_as_long_as_one_of_them() -> None:
    one = shared_weights(11)
    of = one.of
    assert [of.n_bytes(name) for name in ("base", "x", "y", "other")] == [6, 7, 8, 6]
    for name in ("x", "y", "base"):
        one.ask(name, 1.0)
    one.run(100)
    assert one.loads == {"x": 1, "y": 1, "base": 1}, "all three fit"
    assert of.used == sum(of.n_bytes(name) for name in ("base", "x", "y")) == 11
    assert [of.n_bytes(name) for name in ("base", "x", "y")] == [6, 2, 3]
    of.unload("base")
    one.run(200)
    assert of.used == sum(of.n_bytes(name) for name in ("x", "y")) == 10
    assert [of.n_bytes(name) for name in ("base", "x", "y")] == [1, 7, 3]
    of.unload("x")
    of.unload("y")
    one.run(300)
    assert of.used == 0


def test_what_shares_weights_is_unloaded_together_only_if_they_are_needed() -> None:
    for capacity, states in ((11, ["unloaded"] * 3), (12, ["loaded", "unloaded", "unloaded"])):
        one = shared_weights(capacity)
        for i, name in enumerate(("base", "x", "y")):
            one.at(i * 50.0, lambda name=name, on=one: on.ask(name, 1.0))  # type: ignore[misc]
        one.at(200, lambda on=one: on.ask("other", 1.0))  # type: ignore[misc]
        one.run(400)
        assert one.of.state("other") == "loaded"
        assert [one.of.state(name) for name in ("base", "x", "y")] == states
    tight = shared_weights(10)
    for i, name in enumerate(("base", "x", "y")):
        tight.at(i * 50.0, lambda name=name: tight.ask(name, 1.0))  # type: ignore[misc]
    tight.run(400)
    assert [tight.of.state(name) for name in ("base", "x", "y")] == ["unloaded", "loaded", "loaded"]


def test_a_pinned_adapter_keeps_the_weights_that_others_share_with_it() -> None:
    of = Residency(11)
    of.add("x", 2, weights=Weights("base", 5), pinned=True)
    of.add("base", 4, weights=Weights("base", 5))
    with pytest.raises(InvalidRequestError, match="other needs"):
        of.add("other", 5, weights=Weights("other", 0))


# --- what cannot be ---------------------------------------------------------------------------


def test_idle_models_are_given_up_least_recently_used_first_and_one_after_the_other() -> None:
    on = server(3)
    on.of.keep("c", None)
    for name in "abc":
        on.ask(name, 1.0, lambda: None)
    on.run(10 * LOAD)
    assert on.of.idle(1) == ["a"]
    assert on.of.idle(2) == ["a", "b"]
    on.of.unload("a")
    assert on.of.idle(1) == [], "one is on its way"
    on.run(11 * LOAD)
    assert on.of.idle(9) == ["b", "c"]
    on.ask("b", 100.0, lambda: None)
    on.run(12 * LOAD)
    assert on.of.idle(9) == ["c"]


def test_a_lower_limit_leaves_room_for_fewer_and_a_higher_one_for_as_many_as_at_first() -> None:
    on = server(3)
    on.of.limit(1)
    for name in "ab":
        on.ask(name, 1.0, lambda: None)
        on.run(on.now + 10 * LOAD)
    assert [on.of.state(name) for name in "ab"] == ["unloaded", "loaded"]
    on.of.limit(9)
    assert on.of.capacity == 3


def test_a_model_that_never_fits_is_refused_with_figures() -> None:
    of = Residency(10 << 20)
    of.add("pinned", 4 << 20, pinned=True)
    with pytest.raises(InvalidRequestError, match=r"big needs 7 MiB .* next to 4 MiB .* 10 MiB"):
        of.add("big", 7 << 20)


def test_what_is_pinned_later_leaves_room_for_the_others() -> None:
    of = Residency(10)
    of.add("big", 7)
    with pytest.raises(InvalidRequestError, match="big needs"):
        of.add("pinned", 4, pinned=True)


def test_a_load_that_fails_refuses_those_who_wait_and_can_be_tried_again() -> None:
    of = Residency(1)
    of.add("a", 1)
    ticket = of.wait("a", 0.0)
    change = of.next_change(0.0)
    assert change is not None
    of.changing(change)
    of.failed("a")
    assert (of.requests("a"), of.next_change(1.0)) == ((0, 0), None)
    of.leave(ticket)
    of.wait("a", 2.0)
    assert of.next_change(2.0) == change


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimated", [1, 3, 6, 8])
def test_a_wrong_estimate_costs_one_look_and_neither_memory_nor_loads(estimated: int) -> None:
    """Three clients of three models of which two fit; `Server` looks at the budget."""
    right, wrong = (server(8, a=4, b=4, c=4) for _ in range(2))
    wrong.of.resize("a", 0, Weights("a", estimated))
    wrong.true = {"a": 4}
    for one in (right, wrong):
        for name in "abc":
            client(one, name, 1.0, 0.1)
        one.run(2000)
    assert wrong.too_large.total() <= 1
    answered = [sum(map(len, one.waits.values())) for one in (right, wrong)]
    assert wrong.loads.total() <= right.loads.total() + 1
    assert answered[1] >= 0.95 * answered[0]


def test_what_was_measured_counts_from_then_on() -> None:
    one = server(4, a=0, b=0)
    for name, n_bytes in (("a", 3), ("b", 2)):
        one.of.resize(name, 0, Weights(name, n_bytes))
    one.true = {"a": 1, "b": 3}
    for i, name in enumerate("aba"):
        one.at(100.0 * i, lambda name=name: one.ask(name, 1.0))  # type: ignore[misc]
    one.run(400)
    assert (one.of.n_bytes("a"), one.of.n_bytes("b"), one.of.used) == (1, 3, 4)
    assert one.loads == {"a": 1, "b": 1}, "both fit, as they are"


def test_a_model_that_grew_is_refused_with_figures_and_fits_again_when_it_has_shrunk() -> None:
    of = Residency(10 << 20)
    of.add("a", 4 << 20)
    with pytest.raises(InvalidRequestError, match=r"a needs 11 MiB .* at most the 10 MiB"):
        of.resize("a", 11 << 20)
    of.resize("a", 9 << 20)
    assert of.n_bytes("a") == 9 << 20
    of.changing(Change("a", loads=True))
    of.resize("a", 1 << 20)
    assert of.n_bytes("a") == 9 << 20, "one that is being loaded has what it has"


def test_weights_that_were_measured_are_those_of_all_who_share_them() -> None:
    one = shared_weights(14)
    one.true = {"base": 7}
    one.ask("base", 1.0)
    one.run(100)
    assert [one.of.n_bytes(name) for name in ("base", "x", "y")] == [8, 2, 3]
    for name in ("x", "y"):
        one.ask(name, 1.0)
    one.run(200)
    assert one.of.used == 13


# --- fairness ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_two_models_that_alternate_do_not_thrash(pause: float) -> None:
    """Two clients of two models of which one fits: without patience each request costs a load."""
    hasty, patient = (server(1, patience, a=1, b=1) for patience in (EAGER, None))
    for one in (hasty, patient):
        client(one, "a", 1.0, pause)
        client(one, "b", 1.0, pause)
        one.run(2000)
    answered = {
        id(one): sum(len(waits) for waits in one.waits.values()) for one in (hasty, patient)
    }
    per_load = answered[id(patient)] / patient.loads.total()
    assert answered[id(hasty)] / hasty.loads.total() < 1.1
    assert per_load > 8
    assert patient.loads.total() * LOAD <= 2000 * 0.25, "at most a fifth of the time, and a bit"
    assert answered[id(patient)] > 2.5 * answered[id(hasty)]


def test_none_waits_longer_than_the_others_may_keep_their_memory() -> None:
    one = server(1, a=1, b=1, c=1)
    for name in "abc":
        client(one, name, 2.0, 0.1)
    one.run(3000)
    residence = Patience().residence * LOAD
    for name in "abc":
        # Two others before it: each loads, serves, and ends what runs.
        assert max(one.waits[name]) <= 3 * (LOAD + residence + 2.0)
    served = [len(one.waits[name]) for name in "abc"]
    assert max(served) <= 1.2 * min(served)


def test_a_client_that_alternates_by_itself_waits_for_no_patience() -> None:
    """Nothing is gained by keeping a model that its only client has left."""
    one = server(1, a=1, b=1)

    def turn(name: str) -> None:
        one.ask(name, 1.0, lambda: turn("b" if name == "a" else "a"))

    turn("a")
    one.run(1000)
    each = LOAD + 1.0 + Patience().linger * LOAD
    assert one.loads.total() == pytest.approx(1000 / each, rel=0.02)


def test_a_long_answer_is_waited_for_and_new_requests_queue_behind_the_other_model() -> None:
    one = server(1, a=1, b=1)
    one.ask("a", 100.0)
    one.at(10, lambda: one.ask("b", 1.0))
    one.at(60, lambda: one.ask("a", 1.0))
    one.run(300)
    assert one.waits["b"] == [pytest.approx(100 + LOAD - 10 + LOAD)]
    assert one.loads == {"a": 2, "b": 1}
    assert one.waits["a"][1] > 100 - 60
