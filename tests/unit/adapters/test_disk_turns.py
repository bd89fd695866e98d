"""Turns outlive the process; what is damaged or cannot be kept is forgotten."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import Buffer

from semantic.adapters.stores.disk_turns import DiskTurns
from semantic.adapters.stores.remote.remote_records import Records, RemoteTurns
from semantic.application.chat.turn_cache import TurnCache
from semantic.domain.history import Turn, thought_digest
from tests.support.bucket import Bucket, Process

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
    assert "turns cannot be stored on disk" in told[0]


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
        here.put(replace(FIRST, point=points[-1], owner=b"owner"))
        here._writer.submit(lambda: None).result()  # it is there
    for one in machines:
        one.close()
