"""Turns outlive the process; what is damaged or cannot be kept is forgotten."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from semantic.adapters.stores.disk_turns import DiskTurns
from semantic.application.chat.turn_cache import TurnCache
from semantic.domain.history import Turn, thought_digest

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
