"""What every `TurnsPort` and every `SharedTurnsPort` does: give back what it was given, or less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from semantic.adapters.stores.conversations import DiskTurns
from semantic.application.chat.turn_cache import TurnCache
from semantic.domain.chat import Turn, thought_digest
from semantic.ports.store import SharedTurnsPort, TurnsPort
from semantic_fleet.objects.remote_records import Records, RemoteTurns
from tests.support.bucket import Bucket
from tests.support.held_turns import PATIENCE, HeldTurns

FIRST = Turn(b"1" * 32, None, 0, (1, 2, 70_000), thought_digest("hm"), b"owner")
SECOND = Turn(b"2" * 32, b"p" * 32, 2, (5,), thought_digest(""), b"owner")
THIRD = Turn(b"3" * 32, b"q" * 32, 3, (6, 7), thought_digest(""), b"owner")
CUT = replace(FIRST, tokens=())

Make = Callable[[Path], TurnsPort]


def on_disk(folder: Path) -> TurnsPort:
    return DiskTurns(folder / "turns.db", 1 << 20, pytest.fail)


def in_memory(_folder: Path) -> TurnsPort:
    return TurnCache(1 << 20)


def cached(folder: Path) -> TurnsPort:
    return TurnCache(1 << 20, on_disk(folder))


def of_a_fleet(folder: Path) -> TurnsPort:
    shared = RemoteTurns(Records(Bucket().objects(), b"s" * 32, "turns"))
    return TurnCache(1 << 20, on_disk(folder), shared=shared)


def of_a_fleet_in_memory(_folder: Path) -> TurnsPort:
    return TurnCache(1 << 20, shared=RemoteTurns(Records(Bucket().objects(), b"s" * 32, "turns")))


ALONE = (on_disk, in_memory, cached)


def settled(turns: TurnsPort) -> TurnsPort:
    """`turns` when nothing waits to be written."""
    if isinstance(turns, TurnCache):
        wait(turns._writer.waiting | turns._uploads.waiting, PATIENCE)
    return turns


@pytest.fixture(params=[*ALONE, of_a_fleet, of_a_fleet_in_memory], ids=lambda one: one.__name__)
def turns(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TurnsPort]:
    made: TurnsPort = request.param(tmp_path)
    with closing(made):
        yield made


def test_what_was_put_comes_back(turns: TurnsPort) -> None:
    assert turns.get(FIRST.point) is None
    turns.put(FIRST)
    turns.put(SECOND)
    assert [turns.get(one.point) for one in (FIRST, SECOND)] == [FIRST, SECOND]
    assert settled(turns).get(THIRD.point) is None


def test_a_later_turn_takes_the_place_of_an_earlier_one(turns: TurnsPort) -> None:
    turns.put(FIRST)
    other = replace(FIRST, tokens=(9, 9))
    turns.put(other)
    assert settled(turns).get(FIRST.point) == other


def test_a_turn_without_tokens_takes_the_place_of_none(turns: TurnsPort) -> None:
    turns.put(CUT)
    assert settled(turns).get(FIRST.point) == CUT
    turns.put(FIRST)
    settled(turns).put(CUT)
    assert settled(turns).get(FIRST.point) == FIRST


def test_a_turn_without_tokens_hides_none_that_only_the_disk_has(tmp_path: Path) -> None:
    with closing(on_disk(tmp_path)) as before:
        before.put(FIRST)
    with closing(cached(tmp_path)) as turns:
        turns.put(CUT)
        assert turns.get(FIRST.point) == FIRST
        assert settled(turns).get(FIRST.point) == FIRST


@pytest.mark.parametrize("make", ALONE)
def test_nobody_waits_for_a_turn_without_a_fleet(make: Make, tmp_path: Path) -> None:
    turns = make(tmp_path)
    assert turns.put(FIRST) is None
    assert turns.put(CUT) is None
    settled(turns).close()


@pytest.mark.parametrize("make", [of_a_fleet, of_a_fleet_in_memory])
def test_what_is_waited_for_in_a_fleet_ends(make: Make, tmp_path: Path) -> None:
    with closing(make(tmp_path)) as turns:
        for one in (FIRST, SECOND, replace(CUT, point=b"4" * 32)):
            begun = turns.put(one)
            assert begun is not None
            assert begun.result(PATIENCE) is None


@pytest.mark.parametrize("make", [in_memory, cached, of_a_fleet])
def test_an_answer_that_ends_after_the_turns_is_not_recorded(make: Make, tmp_path: Path) -> None:
    turns = make(tmp_path)
    turns.close()
    assert turns.put(FIRST) is None


# Shared ones


def in_a_bucket() -> tuple[SharedTurnsPort, SharedTurnsPort]:
    bucket = Bucket()
    one, other = (RemoteTurns(Records(bucket.objects(), b"s" * 32, "turns")) for _ in "12")
    return one, other


def held() -> tuple[SharedTurnsPort, SharedTurnsPort]:
    fake = HeldTurns()
    fake.go.set()
    return fake, fake


@pytest.fixture(params=[in_a_bucket, held], ids=lambda one: one.__name__)
def two(request: pytest.FixtureRequest) -> Iterator[tuple[SharedTurnsPort, SharedTurnsPort]]:
    """What two machines of one fleet have."""
    made: tuple[SharedTurnsPort, SharedTurnsPort] = request.param()
    yield made
    for one in made:
        one.close()


def test_another_machine_finds_a_turn_when_it_is_put(
    two: tuple[SharedTurnsPort, SharedTurnsPort],
) -> None:
    one, other = two
    points = [turn.point for turn in (FIRST, SECOND, THIRD)]
    one.put(FIRST)
    assert list(other.look_up(b"owner", points)) == []  # the newest are not there
    one.put(THIRD)
    assert list(other.look_up(b"owner", points)) == [FIRST, THIRD]
    assert list(other.look_up(b"another", points)) == []
    assert not one.has_failed


def test_of_shared_turns_one_without_tokens_takes_the_place_of_none(
    two: tuple[SharedTurnsPort, SharedTurnsPort],
) -> None:
    one, other = two
    one.put(CUT)
    assert list(other.look_up(b"owner", [FIRST.point])) == [CUT]
    one.put(FIRST)
    other.put(CUT)
    assert list(other.look_up(b"owner", [FIRST.point])) == [FIRST]
    changed = replace(FIRST, tokens=(9, 9))
    other.put(changed)
    assert list(one.look_up(b"owner", [FIRST.point])) == [changed]
