"""Which folders are taken for a store, which are refused, and that refusing changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from semantic.adapters.stores.disk import DiskStore, FileSystem, index
from semantic.adapters.stores.disk.files import Where
from semantic.domain.block_hash import Part
from semantic.domain.errors import StoreError
from semantic.domain.identity import digest
from tests.support import store_blocks as make
from tests.support.store_blocks import saved_agents
from tests.unit.adapters.disk.support import PLENTY, is_read, opened, put_all


def snapshot(root: Path) -> list[tuple[str, int, int]]:
    paths = [root, *root.rglob("*")]
    return sorted((str(p), p.lstat().st_mode, p.lstat().st_mtime_ns) for p in paths)


def refused(root: Path, message: str) -> None:
    """Opening is refused with `message`, and nothing in or above the folder changes."""
    before = snapshot(root.parent)
    with pytest.raises(StoreError, match=message):
        DiskStore.open(root, PLENTY)
    assert snapshot(root.parent) == before


def test_a_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b #?%20" / "c"
    with opened(root) as store:
        put_all(store, make.chain(300))
    with opened(root) as store:
        assert all(is_read(store, link) for link in make.chain(300))


def test_an_empty_folder_becomes_a_store(root: Path) -> None:
    root.mkdir(mode=0o755)
    with opened(root) as store:
        secret = store.secret
    assert len(secret) == 32
    said = json.loads((root / "FORMAT").read_text())
    assert said == {"format": 1, "secret": digest("store-secret-v1", secret).hex()}


class SlowToList(FileSystem):
    """Before the folder is listed, another process makes it a store."""

    def __init__(self) -> None:
        self.is_made = False

    def names(self, folder: Where | int) -> list[str]:
        if not self.is_made:
            self.is_made = True
            with opened(Path(str(folder))):
                pass
        return super().names(folder)


def test_a_folder_that_becomes_a_store_meanwhile_is_one(root: Path) -> None:
    root.mkdir()
    with closing(DiskStore.open(root, PLENTY, files=SlowToList())) as store, opened(root) as other:
        assert store.secret == other.secret


def test_a_link_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    refused(root, "symbolic link")


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_folder_that_is_gone_while_it_is_open_is_done_without(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_linked: bool
) -> None:
    """Nothing is written where a link leads, and the store goes on when its folder is back."""
    elsewhere, moved = tmp_path / "elsewhere", tmp_path / "moved"
    elsewhere.mkdir()
    first, second, third = make.chain(700)
    with opened(root) as store:
        put_all(store, [first])
        root.rename(moved)
        if is_linked:
            root.symlink_to(elsewhere)
        assert not store.put(make.block(second))
        assert not store.save(make.manifest("ada", 700))
        assert not store.find([second.key(Part.FULL)])
        assert [line.message.startswith(f"the store {root} was") for line in caplog.records] == [
            True
        ]
        if is_linked:
            root.unlink()
        moved.rename(root)
        put_all(store, [second, third])
        assert all(is_read(store, link) for link in (first, second, third))
    assert list(elsewhere.iterdir()) == []


def test_an_index_that_is_locked_for_a_while_is_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_WAIT_SECONDS", 0.01)
    with opened(root) as store:
        put_all(store, make.chain(300))
    with closing(sqlite3.connect(root / "index.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(time, "sleep", lambda _: other.execute("ROLLBACK"))
        with opened(root) as store:
            assert all(is_read(store, link) for link in make.chain(300))
        assert not other.in_transaction


def test_a_file_is_refused(root: Path) -> None:
    root.write_text("x")
    refused(root, "not a folder")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    refused(root, "others can write to")


def test_a_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    refused(root, "belongs to user")


def test_somebody_elses_files_are_not_made_a_store(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "thesis.txt").write_text("x")
    refused(root, "not a store")


def test_a_store_that_0_1_0_wrote_is_read_by_every_later_version(root: Path) -> None:
    """docs/operating.md promises it: the archive stays as it is, and a version that cannot read it
    writes another FORMAT. It has blocks of `make.chain(300)` and the pinned agent "ada"."""
    shutil.unpack_archive(Path(__file__).with_name("format_1.tar.xz"), root, filter="data")
    first, second = make.chain(300)
    with opened(root) as store:
        assert is_read(store, first)
        assert is_read(store, second)
        assert is_read(store, first, Part.WINDOW)
        checkpoint = make.block(second, Part.CHECKPOINT)
        assert store.read(checkpoint.header) == checkpoint.body
        (agent,) = saved_agents(store)
        assert (agent.agent_id, agent.pinned, agent.generation) == ("ada", True, 1)
        assert agent.token_ids == make.text(300)
        assert store.check(read_data=True).is_clean


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 2}', "later version"),
        ("{", "damaged"),
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"format": "1"}', "damaged"),
        ('{"format": 0}', "damaged"),
    ],
)
def test_another_format_is_refused(root: Path, text: str, message: str) -> None:
    with opened(root) as store:
        put_all(store, make.chain(300))
    (root / "FORMAT").write_text(text)
    refused(root, message)


def test_a_format_that_is_a_fifo_does_not_block(root: Path) -> None:
    with opened(root):
        pass
    (root / "FORMAT").unlink()
    os.mkfifo(root / "FORMAT")
    refused(root, "not a plain file")


@pytest.mark.parametrize("secret", [b"", b"x" * 31, b"x" * 33, b"\0" * 32, None])
def test_a_damaged_secret_is_never_replaced_in_silence(root: Path, secret: bytes | None) -> None:
    with opened(root):
        pass
    if secret is None:
        (root / "secret").unlink()
    else:
        (root / "secret").write_bytes(secret)
    with pytest.raises(StoreError, match="secret"):
        DiskStore.open(root, PLENTY)


def test_another_secret_is_refused(root: Path) -> None:
    """Nothing would be found with it, and nothing would say why."""
    with opened(root) as store:
        put_all(store, make.chain(300))
        secret = store.secret
    (root / "secret").write_bytes(secret[:-1] + bytes([secret[-1] ^ 1]))
    refused(root, "secret of the store .* does not match the digest in its FORMAT")
    (root / "secret").write_bytes(secret)
    with opened(root) as store:
        assert all(is_read(store, link) for link in make.chain(300))


@pytest.mark.parametrize("said", ['{"format": 1}', '{"format": 1, "secret": "xyz"}'])
def test_a_format_without_the_secrets_digest_is_refused(root: Path, said: str) -> None:
    with opened(root):
        pass
    (root / "FORMAT").write_text(said)
    refused(root, "FORMAT of the store .* is damaged")


def test_two_stores_have_two_secrets(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as one, opened(tmp_path / "b") as other:
        assert one.secret != other.secret


@pytest.mark.parametrize("name", ["blocks", "agents", "bad", "tmp"])
def test_a_link_in_place_of_a_folder_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    with opened(root):
        pass
    (tmp_path / "elsewhere").mkdir()
    (root / name).rmdir()
    (root / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="symbolic link"):
        DiskStore.open(root, PLENTY)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(root: Path) -> None:
    class ReadOnly(FileSystem):
        def open(self, path: Path | str, flags: int, *, dir_fd: int | None = None) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise OSError(30, "Read-only file system")
            return super().open(path, flags, dir_fd=dir_fd)

    with opened(root):
        pass
    before = snapshot(root)
    with pytest.raises(StoreError, match="Read-only file system"):
        DiskStore.open(root, PLENTY, files=ReadOnly())
    assert snapshot(root) == before


def test_what_a_dead_process_left_unfinished_goes_and_a_live_ones_stays(root: Path) -> None:
    with opened(root) as alive:
        (session,) = (root / "tmp").iterdir()
        (session / "7").write_bytes(b"unfinished")
        dead = root / "tmp" / "00000000deadbeef"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "3").write_bytes(b"x" * 5000)
        (root / "tmp" / "without a lock").mkdir()
        assert alive.gc(dry_run=True).unfinished_files == 2
        assert dead.exists()
        with opened(root):
            assert not dead.exists()
            assert (session / "7").exists()
            assert len(list((root / "tmp").iterdir())) == 2


def test_a_session_that_ends_while_it_is_looked_at_left_nothing(root: Path) -> None:
    class Ending(FileSystem):
        """Lists a session that is gone when it is looked into."""

        def names(self, folder: Where | int) -> list[str]:
            found = super().names(folder)
            return [*found, "00000000deadbeef"] if folder == root / "tmp" else found

    store = DiskStore.open(root, PLENTY, files=Ending())
    for dry_run in (True, False):
        assert store.gc(dry_run=dry_run).unfinished_files == 0
    store.close()


def test_an_interrupted_making_is_finished(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "lock").touch(mode=0o600)
    (root / "secret").write_bytes(b"s" * 32)
    (root / "FORMAT.new").write_text("{")
    with opened(root) as store:
        assert store.secret == b"s" * 32
    with opened(root) as store:
        assert store.secret == b"s" * 32
