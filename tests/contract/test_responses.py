"""What every `ResponsesPort` does: give back exactly what it was given, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from semantic.adapters.stores.conversations import FallbackResponses, SqliteResponses
from semantic.application.chat.memory_responses import MemoryResponses
from semantic.domain.responses import StoredResponse, encoded
from semantic.ports.store import ResponsesPort
from tests.support.lanes import examples
from tests.support.stored_responses import response, with_id

Make = Callable[[Path, int], ResponsesPort]

AMPLE = 1 << 24
ROW_BYTES = 512


def memory(_folder: Path, max_bytes: int) -> ResponsesPort:
    return MemoryResponses(max_bytes)


def sqlite(folder: Path, max_bytes: int) -> ResponsesPort:
    return SqliteResponses(folder / "responses.db", max_bytes)


def steady(folder: Path, max_bytes: int) -> ResponsesPort:
    return FallbackResponses(sqlite(folder, max_bytes), memory(folder, max_bytes), pytest.fail)


MAKERS = (memory, sqlite, steady)


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


@pytest.fixture
def kept(make: Make, tmp_path: Path) -> Iterator[ResponsesPort]:
    with closing(make(tmp_path, AMPLE)) as found:
        yield found


def cost(one: StoredResponse) -> int:
    return len(encoded(one)) + ROW_BYTES


def test_nothing_is_found_where_nothing_was_put(kept: ResponsesPort) -> None:
    assert kept.get("", "resp_1") is None
    assert kept.delete("", "resp_1") is False


def test_what_was_put_comes_back_whole(kept: ResponsesPort) -> None:
    first, second = response(1), response(2, "resp_1")
    kept.put("t", first)
    kept.put("t", second)
    assert kept.get("t", "resp_1") == first
    assert kept.get("t", "resp_2") == second


def test_a_second_one_of_an_id_takes_the_place_of_the_first(kept: ResponsesPort) -> None:
    kept.put("t", response(1))
    other = replace(response(1), agent="somebody else")
    kept.put("t", other)
    assert kept.get("t", "resp_1") == other
    assert kept.delete("t", "resp_1")
    assert kept.get("t", "resp_1") is None


def test_a_tenant_finds_its_own_only(kept: ResponsesPort) -> None:
    kept.put("a", response(1))
    for tenant in ("", "b", "aa", "A"):
        assert kept.get(tenant, "resp_1") is None
        assert kept.delete(tenant, "resp_1") is False
    assert kept.get("a", "resp_1") == response(1)


def test_two_tenants_may_have_the_same_id(kept: ResponsesPort) -> None:
    mine, theirs = response(1), replace(response(1), body='{"theirs": true}')
    kept.put("a", mine)
    kept.put("b", theirs)
    assert kept.delete("a", "resp_1")
    assert kept.get("a", "resp_1") is None
    assert kept.get("b", "resp_1") == theirs


@pytest.mark.parametrize("odd", ["", "\ud83d", "\u0000", "resp_1'; --", "x" * 100_000])
def test_any_text_may_be_asked_for(kept: ResponsesPort, odd: str) -> None:
    assert kept.get(odd, odd) is None
    assert kept.delete(odd, odd) is False
    kept.put(odd, with_id(odd))
    assert kept.get(odd, odd) == with_id(odd)


def test_the_oldest_go_first(make: Make, tmp_path: Path) -> None:
    each = cost(response(1, size=1000))
    with closing(make(tmp_path, 3 * each)) as kept:
        for number in range(1, 5):
            kept.put("t", response(number, size=1000))
        left = [number for number in range(1, 5) if kept.get("t", f"resp_{number}")]
        assert left == [2, 3, 4]
        kept.get("t", "resp_2")  # being read is no reason to stay: it is not used up by time
        kept.put("t", response(5, size=1000))
        assert kept.get("t", "resp_2") is None


def test_a_tenant_takes_no_room_from_one_that_has_less(make: Make, tmp_path: Path) -> None:
    numbers = range(10, 30)
    each = cost(response(10, size=1000))
    with closing(make(tmp_path, 6 * each)) as kept:

        def left(tenant: str) -> list[int]:
            return [n for n in numbers if kept.get(tenant, f"resp_{n}") is not None]

        kept.put("b", response(10, size=1000))
        for number in numbers:
            kept.put("a", response(number, size=1000))
        assert (left("b"), left("a")) == ([10], [25, 26, 27, 28, 29])
        for number in numbers:
            kept.put("b", response(number, size=1000))
        assert (left("b"), left("a")) == ([27, 28, 29], [27, 28, 29])


def test_what_was_deleted_makes_room(make: Make, tmp_path: Path) -> None:
    each = cost(response(1, size=1000))
    with closing(make(tmp_path, 2 * each)) as kept:
        kept.put("t", response(1, size=1000))
        kept.put("t", response(2, size=1000))
        kept.delete("t", "resp_2")
        kept.put("t", response(3, size=1000))
        assert kept.get("t", "resp_1") is not None
        assert kept.get("t", "resp_3") is not None


def test_one_that_is_too_large_for_all_the_room_is_not_kept(make: Make, tmp_path: Path) -> None:
    small, large = response(1), response(2, size=10_000)
    with closing(make(tmp_path, cost(small) + 10)) as kept:
        kept.put("t", small)
        kept.put("t", large)
        assert kept.get("t", "resp_2") is None
        assert kept.get("t", "resp_1") == small


@pytest.mark.process
def test_many_threads_may_use_it(kept: ResponsesPort) -> None:
    wrong: list[object] = []

    def work(tenant: str) -> None:
        for number in range(20):
            kept.put(tenant, response(number))
            if kept.get(tenant, f"resp_{number}") != response(number):
                wrong.append((tenant, number))

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closing_twice_changes_nothing(kept: ResponsesPort) -> None:
    kept.put("t", response(1))
    kept.close()
    kept.close()


class Keeping(RuleBasedStateMachine):
    """Against a plain dictionary without a budget: nothing else is ever found."""

    make: Make

    @initialize(room=st.integers(1, 6))
    def begin(self, room: int) -> None:
        self.folder = self.new_folder()
        self.kept = type(self).make(self.folder, room * cost(response(1, size=500)))
        self.model: dict[tuple[str, str], StoredResponse] = {}

    def new_folder(self) -> Path:
        raise NotImplementedError

    @rule(tenant=st.sampled_from("ab"), number=st.integers(1, 8), size=st.integers(0, 900))
    def put(self, tenant: str, number: int, size: int) -> None:
        one = response(number, size=size)
        self.kept.put(tenant, one)
        self.model[tenant, one.id] = one

    @rule(tenant=st.sampled_from("ab"), number=st.integers(1, 8))
    def delete(self, tenant: str, number: int) -> None:
        name = f"resp_{number}"
        there = self.kept.get(tenant, name) is not None
        assert self.kept.delete(tenant, name) is there
        self.model.pop((tenant, name), None)

    @invariant()
    def only_what_was_put(self) -> None:
        for tenant in "ab":
            for number in range(1, 9):
                name = f"resp_{number}"
                found = self.kept.get(tenant, name)
                assert found is None or found == self.model[tenant, name]

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            self.kept.close()


def test_nothing_else_is_ever_found(make: Make, tmp_path_factory: pytest.TempPathFactory) -> None:
    class Machine(Keeping):
        def new_folder(self) -> Path:
            return tmp_path_factory.mktemp("responses")

    Machine.make = staticmethod(make)
    Machine.TestCase.settings = settings(
        max_examples=examples(15, thorough=100), stateful_step_count=20, deadline=None
    )
    Machine.TestCase("runTest").runTest()
