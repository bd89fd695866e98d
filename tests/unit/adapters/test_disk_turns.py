"""Turns outlive the process; what is damaged or cannot be kept is forgotten."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import Buffer

from semantic.adapters.stores.conversations import DiskTurns
from semantic.application.chat.turn_cache import TurnCache
from semantic.domain.chat import Turn, thought_digest
from semantic.ports.store import MOST_WAIT
from semantic_fleet.objects.remote_records import Records, RemoteTurns
from tests.support.bucket import Bucket, Process
from tests.support.fake_clock import FakeClock
from tests.support.held_turns import PATIENCE, HeldTurns

FIRST = Turn(b"1" * 32, None, 0, (1, 2, 70_000), thought_digest("hm"))
SECOND = Turn(b"2" * 32, FIRST.point, 2, (), thought_digest(""))


def nobody(said: str) -> None:
    raise AssertionError(said)


def test_turns_come_back_in_another_process(tmp_path: Path) -> None:
    turns = TurnCache(1 << 20, DiskTurns(tmp_path / "turns.db", 1 << 20, nobody))
    turns.put(FIRST)
    turns.put(SECOND)
    turns.close()
    again = TurnCache(1 << 20, DiskTurns(tmp_path / "turns.db", 1 << 20, nobody))
    assert [again.get(turn.point) for turn in (FIRST, SECOND)] == [FIRST, SECOND]
    assert again.get(b"3" * 32) is None
    again.close()


def test_a_tenant_takes_no_room_from_one_that_has_less(tmp_path: Path) -> None:
    turns = DiskTurns(tmp_path / "turns.db", 10_000, nobody)
    turns.put(replace(FIRST, owner=b"b"))
    for number in range(100):
        turns.put(replace(FIRST, point=number.to_bytes(32, "big"), owner=b"a"))
    assert turns.get(FIRST.point) == FIRST
    found = [turns.get(number.to_bytes(32, "big")) is not None for number in range(100)]
    assert found == [False] * found.index(True) + [True] * found.count(True)
    turns.close()


class Held(DiskTurns):
    """Turns whose first one is written when `go` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 1 << 20, nobody)
        self.go, self.tried = threading.Event(), 0

    def put(self, turn: Turn) -> None:
        self.tried += 1
        self.go.wait()
        super().put(turn)


def test_turns_that_wait_to_be_written_are_bounded(tmp_path: Path) -> None:
    held = Held(tmp_path / "turns.db")
    turns = TurnCache(1 << 20, held, queue_bytes=10_000)
    for number in range(100):
        turns.put(replace(FIRST, point=number.to_bytes(32, "big")))
    held.go.set()
    turns.close()
    assert 1 < held.tried < 20


def test_turns_are_uploaded_side_by_side_and_not_behind_the_disk(tmp_path: Path) -> None:
    """What each end of an answer waits for is its own upload."""
    held, shared = Held(tmp_path / "turns.db"), HeldTurns()
    turns = TurnCache(1 << 20, held, shared=shared)
    many = [replace(FIRST, point=number.to_bytes(32, "big")) for number in range(4)]
    begun = [turns.put(one) for one in many]
    shared.wait_for(4)  # all at once, while the first is still written here
    assert held.tried <= 1
    assert not any(one is None or one.done() for one in begun)
    shared.go.set()
    assert [one and one.result(PATIENCE) for one in begun] == [None] * 4
    assert shared.look_up(b"", [one.point for one in many]) == many
    held.go.set()
    turns.close()
    assert shared.is_closed


def test_nobody_waits_for_what_has_failed_but_it_is_tried(tmp_path: Path) -> None:
    shared = HeldTurns()
    turns = TurnCache(1 << 20, DiskTurns(tmp_path / "turns.db", 1 << 20, nobody), shared=shared)
    shared.fails = True
    assert turns.put(FIRST) is None
    shared.wait_for(1)
    shared.fails = False  # it answers again
    shared.go.set()
    turns.close()
    assert shared.look_up(b"", [FIRST.point]) == [FIRST]


def test_uploads_that_wait_are_bounded() -> None:
    shared = HeldTurns()
    turns = TurnCache(1 << 20, queue_bytes=10_000, shared=shared)
    begun = [turns.put(replace(FIRST, point=one.to_bytes(32, "big"))) for one in range(100)]
    assert 1 < sum(one is not None for one in begun) < 20
    shared.go.set()
    turns.close()


def test_nobody_waits_behind_an_upload_that_is_late() -> None:
    """Nor for it, who comes later; a store that hangs has not failed yet."""
    objects, hangs, go = Bucket().objects(), threading.Event(), threading.Event()
    clock = objects._clock
    assert isinstance(clock, FakeClock)

    def hang(_: str) -> None:
        hangs.set()
        assert go.wait(PATIENCE)

    objects.before = hang
    shared = RemoteTurns(Records(objects, b"s" * 32, "turns"))
    turns = TurnCache(1 << 20, shared=shared)
    first = turns.put(FIRST)
    assert hangs.wait(PATIENCE)
    assert first is not None
    assert turns.put(SECOND) is not None
    clock.advance(MOST_WAIT)
    assert turns.put(replace(FIRST, tokens=(3,))) is None
    go.set()
    first.result(PATIENCE)
    wait(turns._uploads.waiting, PATIENCE)
    assert turns.put(FIRST) is not None
    turns.close()


def test_closing_does_not_wait_for_a_file_that_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semantic.adapters.stores.records._WAIT_SECONDS", 0.2)
    path, said = tmp_path / "turns.db", list[str]()
    below = DiskTurns(path, 1 << 20, said.append)
    below.put(FIRST)
    below.close()
    locker = sqlite3.connect(path, isolation_level=None)
    locker.execute("BEGIN IMMEDIATE")
    turns = TurnCache(1 << 20, below, close_seconds=0.0)
    for number in range(100):
        turns.put(replace(FIRST, point=number.to_bytes(32, "big")))
    turns.close()
    locker.execute("ROLLBACK")
    locker.close()
    assert len(said) == 1
    last = (99).to_bytes(32, "big")
    assert DiskTurns(path, 1 << 20, nobody).get(last) is None


@pytest.mark.parametrize(
    "damage",
    ["data = zeroblob(length(data))", "data = substr(data, 1, 9)", "proof = 'x'", "data = 5"],
)
def test_a_damaged_turn_is_forgotten(tmp_path: Path, damage: str) -> None:
    turns = DiskTurns(tmp_path / "turns.db", 1 << 20, nobody)
    turns.put(FIRST)
    turns.close()
    with sqlite3.connect(tmp_path / "turns.db") as db:
        db.execute(f"UPDATE records SET {damage}")
    db.close()
    assert turns.get(FIRST.point) is None
    turns.put(FIRST)
    assert turns.get(FIRST.point) == FIRST
    turns.close()


def test_where_turns_cannot_be_kept_somebody_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    turns = DiskTurns(tmp_path / "nowhere" / "turns.db", 1 << 20, told.append)
    for _ in range(3):
        turns.put(FIRST)
        assert turns.get(FIRST.point) is None
    turns.close()
    assert len(told) == 1
    assert "cannot store turns on disk" in told[0]


def test_an_agent_that_alternates_between_machines_reads_each_turn_once(tmp_path: Path) -> None:
    """Not its whole history with each turn."""
    bucket = Bucket()
    asked: list[str] = []

    class Asked(Process):
        def get(self, path: str) -> Buffer:
            asked.append(path)
            return super().get(path)

    def machine(name: str) -> TurnCache:
        shared = RemoteTurns(Records(Asked(bucket), b"s" * 32, "turns"))
        return TurnCache(1 << 20, DiskTurns(tmp_path / name, 1 << 20, nobody), shared=shared)

    machines, points = [machine("one"), machine("two")], list[bytes]()
    for number in range(20):
        here = machines[number % 2]
        asked.clear()
        here.look_up(b"owner", points)
        assert all(here.get(point) for point in points)
        assert len([path for path in asked if path.startswith("turns/")]) <= 2
        points.append(number.to_bytes(32, "big"))
        begun = here.put(replace(FIRST, point=points[-1], owner=b"owner"))
        assert begun is not None
        begun.result()  # it is there
    for one in machines:
        one.close()
