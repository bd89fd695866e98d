"""What a store has written by day: over restarts, crashes, processes, and clocks that jump."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore
from semantic.adapters.stores.disk.files import FileSystem
from semantic.adapters.stores.disk.folder import Folder, open_folder
from semantic.adapters.stores.disk.quota import (
    MOST_DAYS,
    NAME,
    SETTLE_BYTES,
    SETTLE_SECONDS,
    WriteLedger,
    WriteLimits,
)
from tests.support import store_blocks as make
from tests.support.fake_clock import FakeClock
from tests.unit.adapters.disk.support import PLENTY, opened, put_all

DAY = 86_400.0
NOON = time.mktime((2026, 3, 10, 12, 0, 0, 0, 0, -1))


class Days:
    """A ledger over a folder, on a day that the test chooses."""

    def __init__(self, folder: Folder, limit: int | None = None) -> None:
        self.now = NOON
        self.clock = FakeClock()
        self.folder = folder
        self.limits = WriteLimits(limit, rated=10**9)
        self.ledger = self.another()

    def another(self) -> WriteLedger:
        """A second one over the same folder: another process, or the next."""
        ledger = WriteLedger(
            self.folder, self.limits, durable=False, now=lambda: self.now, clock=self.clock
        )
        self.folder.on_written = lambda _: None  # its own file is not what the test counts
        return ledger

    def write(self, n_bytes: int, days_later: float = 0) -> None:
        """Count bytes, on another day."""
        self.now = NOON + days_later * DAY
        self.ledger.add(n_bytes)


@pytest.fixture
def folder(root: Path) -> Iterator[Folder]:
    opened = open_folder(root, FileSystem())
    yield opened
    opened.close()


def test_a_store_counts_what_it_writes_over_restarts(root: Path) -> None:
    links = make.chain(1000)
    with opened(root) as store:
        put_all(store, links)
        assert store.save(make.manifest("a", 1000))
        first = store.stats()[0].wear
        files = [*root.rglob("blocks/*/*"), *root.rglob("agents/*/*")]
        assert first is not None
        assert sum(path.stat().st_size for path in files) == first.total == first.today
        assert first.since == first.day == date.today().isoformat()  # noqa: DTZ011
        put_all(store, links)  # all there: nothing is written again
        assert store.stats()[0].wear == first
    with opened(root) as store:
        again = store.stats()[0].wear
        assert again is not None
        assert 0 <= again.total - first.total < 200  # the count itself
        assert (again.share, again.holds_back) == (None, False)


def test_a_store_that_writes_nothing_has_no_count(root: Path) -> None:
    with opened(root):
        pass
    with opened(root):
        pass
    assert not (root / NAME).exists()


def test_days_are_kept_apart_and_the_old_ones_go(folder: Folder) -> None:
    days = Days(folder)
    for number in range(MOST_DAYS + 5):
        days.write(100, number)
    days.ledger.settle()
    wear = days.another().wear()
    assert (len(wear.days), wear.today) == (MOST_DAYS, 100)
    assert list(wear.days) == sorted(wear.days)
    assert wear.total == 100 * (MOST_DAYS + 5)
    assert wear.since == "2026-03-10"
    assert wear.share == pytest.approx(wear.total / 10**9)


def test_a_clock_that_jumps_loses_nothing(folder: Folder) -> None:
    days = Days(folder, limit=150)
    days.write(100)
    days.write(1, 30_000)  # decades ahead
    assert not days.ledger.holds_back
    days.write(60)  # and back
    assert days.ledger.holds_back
    days.ledger.settle()
    days.now = 0.0  # before it is set, after a start
    days.ledger.add(7)
    days.ledger.settle()
    wear = days.another().wear()
    assert (wear.total, wear.today) == (168, 7)
    assert wear.days["2026-03-10"] == 160
    days.now = NOON
    assert days.another().holds_back


def test_two_processes_add_up(folder: Folder) -> None:
    days = Days(folder, limit=150)
    other = days.another()
    days.ledger.add(100)
    other.add(50)
    assert not other.holds_back  # it does not know of the other's yet
    days.ledger.settle()
    other.settle()
    assert other.holds_back
    assert other.wear().total == days.another().wear().total == 150


def test_it_is_written_now_and_then_only(folder: Folder) -> None:
    days = Days(folder)
    days.ledger.add(SETTLE_BYTES - 1)
    days.ledger.settle_if_due()
    assert not (folder.root / NAME).exists()
    days.ledger.add(1)
    days.ledger.settle_if_due()
    assert days.another().wear().total == SETTLE_BYTES
    days.ledger.add(5)
    days.clock.advance(SETTLE_SECONDS)
    days.ledger.settle_if_due()
    assert days.another().wear().total == SETTLE_BYTES + 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 80,
        "[]",
        "{}",
        '{"since": "yesterday", "total": 1, "days": {}}',
        '{"since": "2026-01-01", "total": -1, "days": {}}',
        '{"since": "2026-01-01", "total": 1e9, "days": {}}',
        '{"since": "2026-01-01", "total": 1, "days": {"today": 1}}',
        '{"since": "2026-01-01", "total": 1, "days": {"2026-01-01": 99999999999999999999}}',
        "[" * 4000,
    ],
)
def test_a_damaged_file_begins_a_new_count(folder: Folder, text: str) -> None:
    (folder.root / NAME).write_text(text)
    days = Days(folder)
    days.write(100)
    days.ledger.settle()
    found = json.loads((folder.root / NAME).read_text())
    assert found == {"since": "2026-03-10", "total": 100, "days": {"2026-03-10": 100}}


def test_a_file_that_cannot_be_written_is_written_later(folder: Folder) -> None:
    days = Days(folder)
    days.write(100)
    (folder.root / NAME).mkdir()
    days.ledger.settle()
    assert days.ledger.wear().total == 100
    (folder.root / NAME).rmdir()
    days.ledger.settle()
    assert days.another().wear().total == 100


def test_no_link_is_followed(folder: Folder, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text('{"since": "2026-01-01", "total": 1, "days": {}}')
    (folder.root / NAME).symlink_to(foreign)
    days = Days(folder)
    assert days.ledger.wear().total == 0
    days.write(100)
    days.ledger.settle()
    assert "2026-01-01" in foreign.read_text()
    assert days.another().wear().total == 100


def test_the_limit_is_logged_once_a_day(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    days = Days(folder, limit=3 << 29)
    with caplog.at_level(logging.WARNING, logger="semantic.store"):
        days.write((3 << 29) - 1)
        assert not days.ledger.holds_back
        assert not caplog.messages
        days.write(1)
        assert [days.ledger.holds_back for _ in range(3)] == [True] * 3
        days.write(0, 1)
        assert not days.ledger.holds_back
        days.write(3 << 29, 1)
        assert days.ledger.holds_back
    assert len(caplog.messages) == 2
    assert "has written 1.5 GiB today, its daily limit: until midnight" in caplog.messages[0]


def test_ends_of_turns_are_written_at_the_limit(root: Path) -> None:
    """A store refuses nothing by itself: what is interim is sorted out before it."""
    store = DiskStore.open(root, PLENTY, writes=WriteLimits(1), durable=False)
    try:
        put_all(store, make.chain(300))
        assert store.holds_back
        assert store.save(make.manifest("a", 300))
        put_all(store, make.chain(600, seed=1))
    finally:
        store.close()
