"""What a person can ask of a store on disk: is all of it sound, and what could go.

`check` changes nothing. `collect` deletes what nobody needs, or says what it would.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from semantic.adapters.stores.disk import block_rows
from semantic.adapters.stores.disk.entries import (
    DamagedError,
    Kind,
    Listed,
    NewerFormatError,
    block_entry,
    parse_block,
    parse_manifest,
)
from semantic.adapters.stores.disk.manifest_file import read_manifest
from semantic.adapters.stores.disk.open_store import OpenStore
from semantic.adapters.stores.disk.schema import IndexBrokenError, whole
from semantic.domain.block_hash import BlockKey
from semantic.domain.errors import InvalidRequestError, StoreError


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged file, by its path inside the store, and what is wrong with it."""

    path: str
    damage: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found. `n_bytes` are those of the sound files; `foreign` are paths of files
    that are not ours, `newer` of files that a later version wrote.
    """

    n_blocks: int
    n_manifests: int
    n_bytes: int
    damaged: tuple[Problem, ...]
    foreign: tuple[str, ...]
    newer: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What was deleted, or, when `dry_run`, would be.

    Blocks that belong to no agent; files that dead processes left unfinished; damaged files that
    were kept; blocks that had to go for the budget. `freed_bytes` is by how much less is used.
    """

    dry_run: bool
    unneeded_blocks: int
    unfinished_files: int
    damaged_files: int
    evicted_blocks: int
    freed_bytes: int


class _UndoneError(Exception):
    """Ends a transaction that was only to try something."""


class Maintenance:
    """Raises StoreError where the folder cannot be read or written."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store

    def check(self, *, read_data: bool, subset: tuple[int, int]) -> CheckReport:
        """See `DiskStore.check`."""
        part, parts = subset
        if not 1 <= part <= parts:
            raise InvalidRequestError(
                f"subset must be (n, m) with n from 1 to m, got ({part}, {parts})"
            )
        checking = _Checking(self._store, read_data=read_data)
        try:
            for listed in self._listed():
                if _share(listed, parts) == part - 1:
                    checking.look(listed)
        except OSError as error:
            raise StoreError(f"the store cannot be read: {error}") from error
        return checking.report()

    def collect(self, *, dry_run: bool) -> CollectReport:
        """See `DiskStore.gc`."""
        try:
            with self._store.changing, self._store.folder.locked():
                return self._store.on_index(lambda: self._collect(dry_run=dry_run))
        except OSError as error:
            raise StoreError(f"the store cannot be cleaned: {error}") from error

    def rebuild(self) -> None:
        """See `DiskStore.rebuild_index`."""
        try:
            with self._store.changing:
                self._store.rebuild()
        except (OSError, IndexBrokenError) as error:
            raise StoreError(f"the index cannot be rebuilt: {error}") from error

    def _listed(self) -> Iterator[Listed]:
        for kind in Kind:
            yield from self._store.entries.listed(kind)

    def _collect(self, *, dry_run: bool) -> CollectReport:
        folder, index = self._store.folder, self._store.index
        unfinished = folder.leftovers()
        if not dry_run:
            folder.reap()
        reports = []
        try:
            with index.writing() as db:
                reports.append(self._delete(db, unfinished, dry_run=dry_run))
                _undo_if(wanted=dry_run)
        except _UndoneError:
            pass
        return reports[0]

    def _delete(self, db: sqlite3.Connection, unfinished: int, *, dry_run: bool) -> CollectReport:
        entries, room = self._store.entries, self._store.room
        before = room.used(db)
        alive = [name for name, lives in self._store.folder.sessions().items() if lives]
        places = ",".join("?" * len(alive))
        sql = f"DELETE FROM reservations WHERE session NOT IN ({places})"  # noqa: S608
        db.execute(sql, alive)
        bad = entries.bad_names()
        for name in bad if not dry_run else ():
            entries.delete_bad(name)
        db.execute("DELETE FROM others WHERE name LIKE 'bad/%'")
        unneeded = block_rows.unneeded(db)
        for victim in unneeded:
            if not dry_run:
                entries.delete(block_entry(victim.key))
            block_rows.drop(db, victim.key)
        n_left = _count_blocks(db)
        room.make(db, 0, delete=not dry_run)
        return CollectReport(
            dry_run=dry_run,
            unneeded_blocks=len(unneeded),
            unfinished_files=unfinished,
            damaged_files=len(bad),
            evicted_blocks=n_left - _count_blocks(db),
            freed_bytes=before - room.used(db),
        )


class _Checking:
    """Looks at one file after the other."""

    def __init__(self, store: OpenStore, *, read_data: bool) -> None:
        self._store = store
        self._read_data = read_data
        self._n_blocks = 0
        self._n_manifests = 0
        self._n_bytes = 0
        self._damaged: list[Problem] = []
        self._foreign: list[str] = []
        self._newer: list[str] = []

    def look(self, listed: Listed) -> None:
        name = "" if listed.entry is None else listed.entry.name
        block, manifest = parse_block(name), parse_manifest(name)
        is_block = listed.path.startswith(f"{Kind.BLOCKS}/")
        try:
            if block is not None and is_block:
                self._look_at_block(block)
                self._n_blocks += 1
            elif manifest is not None and not is_block:
                read_manifest(self._store.entries, *manifest)
                self._n_manifests += 1
            else:
                self._foreign.append(listed.path)
                return
        except DamagedError as damage:
            self._damaged.append(Problem(listed.path, damage.kind))
        except NewerFormatError:
            self._newer.append(listed.path)
        except FileNotFoundError:
            pass  # evicted meanwhile
        except OSError as error:
            self._damaged.append(Problem(listed.path, error.strerror or "cannot be read"))
        else:
            self._n_bytes += listed.n_bytes or 0

    def report(self) -> CheckReport:
        return CheckReport(
            self._n_blocks,
            self._n_manifests,
            self._n_bytes,
            tuple(self._damaged),
            tuple(self._foreign),
            tuple(self._newer),
        )

    def _look_at_block(self, key: BlockKey) -> None:
        if self._read_data:
            self._store.reader.check(key)
        else:
            self._store.reader.header(key)


def _undo_if(*, wanted: bool) -> None:
    if wanted:
        raise _UndoneError


def _share(listed: Listed, parts: int) -> int:
    """Which of `parts` equal shares a file belongs to: by its name, which is a hash."""
    name = "" if listed.entry is None else listed.entry.name
    ours = parse_block(name) or parse_manifest(name)
    return int(name[:16], 16) % parts if ours else 0


def _count_blocks(db: sqlite3.Connection) -> int:
    return whole(db.execute("SELECT count(*) FROM blocks").fetchone()[0])
