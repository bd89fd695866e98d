"""The file of responses: after a restart, damaged, locked, planted, of a later version."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from semantic.adapters.stores import records as records_module
from semantic.adapters.stores.conversations import FallbackResponses, SqliteResponses
from semantic.application.chat.memory_responses import MemoryResponses
from semantic.domain.errors import StoreError
from tests.support.stored_responses import response

AMPLE = 1 << 24


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def fallback(path: Path, told: list[str]) -> Iterator[FallbackResponses]:
    """What a server uses."""
    disk = SqliteResponses(path, AMPLE, told.append)
    with closing(FallbackResponses(disk, MemoryResponses(AMPLE), told.append)) as found:
        yield found


def fill(path: Path, *numbers: int, max_bytes: int = AMPLE) -> None:
    with closing(SqliteResponses(path, max_bytes)) as kept:
        for number in numbers:
            kept.put("t", response(number))


def change(path: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(sql, values).rowcount != 0


def bad_files(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir() if ".bad-" in one.name)


def test_responses_survive_a_restart(path: Path) -> None:
    fill(path, 1, 2)
    with closing(SqliteResponses(path, AMPLE)) as kept:
        assert [kept.get("t", f"resp_{n}") for n in (1, 2, 3)] == [response(1), response(2), None]


def test_the_order_survives_a_restart(path: Path) -> None:
    fill(path, 2, 1)
    size = path.stat().st_size
    with closing(sqlite3.connect(path)) as db:
        [total] = db.execute("SELECT bytes FROM total").fetchone()
    fill(path, 3, max_bytes=total)
    with closing(SqliteResponses(path, AMPLE)) as kept:
        assert kept.get("t", "resp_2") is None
        assert kept.get("t", "resp_1") == response(1)
        assert kept.get("t", "resp_3") == response(3)
    assert path.stat().st_size == size, "room that is free is used again"


def test_a_file_of_the_version_before_is_used_with_what_it_has(path: Path) -> None:
    fill(path, 1, 2)
    with closing(sqlite3.connect(path)) as db:
        for name in ("TRIGGER owners_come", "TRIGGER owners_go", "TABLE owners"):
            db.execute(f"DROP {name}")
        db.execute("DROP INDEX records_by_owner")
        db.execute("ALTER TABLE records DROP COLUMN owner")
        db.execute("PRAGMA user_version = 1")
        [total] = db.execute("SELECT bytes FROM total").fetchone()
    fill(path, 3, max_bytes=total)
    with closing(SqliteResponses(path, AMPLE)) as kept:
        found = [kept.get("t", f"resp_{number}") for number in (1, 2, 3)]
    assert found == [None, response(2), response(3)]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT sum(bytes) FROM owners").fetchone() == (
            db.execute("SELECT bytes FROM total").fetchone()
        )


def test_nobody_else_may_read_the_files(path: Path) -> None:
    with closing(SqliteResponses(path, AMPLE)) as kept:
        kept.put("t", response(1))
        names = [one for one in path.parent.iterdir() if one.name.startswith(path.name)]
        assert len(names) == 3
        assert {stat.S_IMODE(one.stat().st_mode) for one in names} == {0o600}


def test_a_file_that_others_may_read_is_taken_from_them(path: Path) -> None:
    fill(path, 1)
    path.chmod(0o644)
    fill(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_neither_tenant_nor_deleted_text_stands_in_the_file(path: Path) -> None:
    tenant = "tenant-of-a-key"
    with closing(SqliteResponses(path, AMPLE)) as kept:
        kept.put(tenant, response(1))
        assert b"answer 1" in everything(path)
        kept.delete(tenant, "resp_1")
        assert b"answer 1" not in everything(path)
    assert tenant.encode() not in everything(path)


def everything(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in path.parent.iterdir() if p.name.startswith(path.name))


@pytest.mark.parametrize(
    ("sql", "values"),
    [
        ("UPDATE records SET data = replace(data, ?, ?)", (b"answer 1", b"answer 9")),
        ("UPDATE records SET data = substr(data, 1, 40)", ()),
        ("UPDATE records SET data = ?", (b"",)),
        ("UPDATE records SET data = 'text'", ()),
        ("UPDATE records SET data = 5", ()),
        ("UPDATE records SET proof = zeroblob(32)", ()),
        ("UPDATE records SET proof = 'text'", ()),
    ],
)
def test_a_damaged_row_is_absent(path: Path, sql: str, values: tuple[object, ...]) -> None:
    fill(path, 1)
    change(path, sql, *values)
    with closing(SqliteResponses(path, AMPLE)) as kept:
        assert kept.get("t", "resp_1") is None
        kept.put("t", response(1))
        assert kept.get("t", "resp_1") == response(1)


def test_a_row_under_anothers_key_is_absent(path: Path) -> None:
    """Even a whole row: it was proven for the place where it stood."""
    fill(path, 1, 2)
    change(path, "DELETE FROM records WHERE number = 1")
    with closing(SqliteResponses(path, AMPLE)) as kept:
        kept.put("u", response(1))
    with closing(sqlite3.connect(path)) as db, db:
        [(theirs,)] = db.execute("SELECT key FROM records WHERE number = 3").fetchall()
        db.execute("DELETE FROM records WHERE number = 3")
        db.execute("UPDATE records SET key = ? WHERE number = 2", (theirs,))
    with closing(SqliteResponses(path, AMPLE)) as kept:
        assert kept.get("u", "resp_1") is None


def no_database(path: Path) -> None:
    path.write_bytes(b"This is no database. " * 500)


def cut(path: Path) -> None:
    fill(path, *range(1, 40))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def other_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE theirs(x)")


def lost_table(path: Path) -> None:
    fill(path, 1)
    change(path, "DROP TABLE records")


def overwritten(path: Path) -> None:
    fill(path, *range(1, 40))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(Random(1).randbytes(path.stat().st_size - 4096))


def a_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(b"")
    path.symlink_to(target)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_linked_log(path: Path) -> None:
    fill(path, 1)
    path.with_name("responses.db-wal").symlink_to(path.with_name("elsewhere"))


BREAK = [
    no_database,
    cut,
    other_program,
    lost_table,
    overwritten,
    a_link,
    a_folder,
    a_fifo,
    a_linked_log,
]


@pytest.mark.parametrize("break_it", BREAK, ids=lambda one: one.__name__)
def test_a_broken_file_is_moved_aside_and_a_new_one_made(
    path: Path, fallback: FallbackResponses, told: list[str], break_it: Callable[[Path], None]
) -> None:
    break_it(path)
    for number in range(1, 40):
        assert fallback.get("t", f"resp_{number}") in (None, response(number))
    fallback.put("t", response(50))
    assert fallback.get("t", "resp_50") == response(50)
    assert len(told) == 1
    assert "broken" in told[0]
    assert bad_files(path)
    fallback.close()
    with closing(SqliteResponses(path, AMPLE)) as kept:
        assert kept.get("t", "resp_50") == response(50), "it is on disk"
    assert not path.with_name("elsewhere").exists() or not path.with_name("elsewhere").read_bytes()


def test_a_file_that_breaks_while_it_is_open_is_replaced(
    path: Path, fallback: FallbackResponses, told: list[str]
) -> None:
    fallback.put("t", response(1))
    change(path, "DROP TABLE records")
    assert fallback.get("t", "resp_1") is None
    fallback.put("t", response(2))
    assert fallback.get("t", "resp_2") == response(2)
    assert len(told) == 1


def test_what_another_process_has_moved_is_not_moved_again(path: Path) -> None:
    """Two notice the damage; the second must leave alone what the first has made anew."""
    told: list[str] = []
    with (
        closing(SqliteResponses(path, AMPLE, told.append)) as first,
        closing(SqliteResponses(path, AMPLE, told.append)) as second,
    ):
        first.put("t", response(1))
        second.put("t", response(2))
        change(path, "DROP TABLE records")
        first.put("t", response(3))
        assert second.get("t", "resp_2") is None
        assert second.get("t", "resp_3") == response(3)
    assert len(told) == 1


def test_two_processes_share_the_file(path: Path) -> None:
    with (
        closing(SqliteResponses(path, AMPLE)) as first,
        closing(SqliteResponses(path, AMPLE)) as second,
    ):
        first.put("t", response(1))
        assert second.get("t", "resp_1") == response(1)
        second.put("t", response(2))
        assert first.get("t", "resp_2") == response(2)
        assert second.delete("t", "resp_1")
        assert first.get("t", "resp_1") is None


def test_a_folder_that_was_replaced_by_a_link_is_not_followed(
    tmp_path: Path, told: list[str]
) -> None:
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    disk = SqliteResponses(folder / "responses.db", AMPLE, told.append)
    with closing(FallbackResponses(disk, MemoryResponses(AMPLE), told.append)) as kept:
        kept.put("t", response(1))
        disk.close()
        folder.rename(tmp_path / "moved")
        folder.symlink_to(elsewhere)
        kept.put("t", response(2))
        assert kept.get("t", "resp_2") == response(2)
    assert list(elsewhere.iterdir()) == []
    assert len(told) == 1
    assert "was replaced" in told[0]


def test_files_that_ran_out_are_tried_again(
    path: Path, fallback: FallbackResponses, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, 1)

    def none_left(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        with pytest.raises(StoreError, match="Too many open files"):
            fallback.get("t", "resp_1")
    assert fallback.get("t", "resp_1") == response(1)


def test_a_locked_file_is_waited_for_and_then_done_without(
    path: Path, fallback: FallbackResponses, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "_WAIT_SECONDS", 0.01)
    fallback.put("t", response(1))
    fallback.close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        fallback.put("t", response(2))
        assert fallback.get("t", "resp_2") == response(2)
        with pytest.raises(StoreError, match="locked"):
            fallback.get("t", "resp_1")
        with pytest.raises(StoreError, match="locked"):
            fallback.delete("t", "resp_1")
        fallback.put("t", response(3))
    assert len(told) == 1
    assert "in memory" in told[0]
    assert fallback.get("t", "resp_1") == response(1)
    fallback.put("t", response(4))
    fallback.close()
    with closing(SqliteResponses(path, AMPLE)) as kept:
        assert kept.get("t", "resp_4") == response(4), "the disk is used again"
        assert kept.get("t", "resp_3") is None


def later_version(path: Path) -> None:
    fill(path, 1)
    change_pragma(path, "PRAGMA user_version = 99")


def change_pragma(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(sql)


def no_folder(path: Path) -> None:
    path.parent.rmdir()


@pytest.mark.parametrize("break_it", [later_version, no_folder], ids=lambda one: one.__name__)
def test_where_the_file_cannot_be_used_memory_is(
    path: Path, fallback: FallbackResponses, told: list[str], break_it: Callable[[Path], None]
) -> None:
    break_it(path)
    before = path.read_bytes() if path.exists() else b""
    assert fallback.get("t", "resp_1") is None
    fallback.put("t", response(2))
    assert fallback.get("t", "resp_2") == response(2)
    assert fallback.delete("t", "resp_2")
    assert len(told) == 1
    assert "in memory" in told[0]
    assert (path.read_bytes() if path.exists() else b"") == before


def test_a_store_that_is_off_is_left_alone(path: Path, fallback: FallbackResponses) -> None:
    fallback.disable_disk()
    fallback.put("t", response(1))
    assert fallback.get("t", "resp_1") == response(1)
    assert fallback.get("t", "resp_2") is None
    assert fallback.delete("t", "resp_1")
    assert not path.exists()
