"""Maintenance of a disk store: `check` verifies its files, `collect` deletes unneeded ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
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
from semantic.adapters.stores.disk.schema import whole
from semantic.domain.block_hash import BlockKey
from semantic.domain.errors import InvalidRequestError, StoreError
from semantic.domain.stored import OnProgress


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged file's path inside the store, and its damage."""

    path: str
    damage: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check. `foreign` has the paths of other programs' files, `newer` the paths of
    files from a later version."""

    n_blocks: int
    n_manifests: int
    n_bytes: int
    damaged: tuple[Problem, ...]
    foreign: tuple[str, ...]
    newer: tuple[str, ...]

    @property
    def is_clean(self) -> bool:
        """True if the check found no damaged file."""
        return not self.damaged


@dataclass(frozen=True, slots=True)
class CollectReport:
    """The numbers of files that `collect` deleted, or would delete in a dry run. `freed_bytes`
    is the decrease of the bytes in use."""

    dry_run: bool
    unneeded_blocks: int
    unfinished_files: int
    damaged_files: int
    evicted_blocks: int
    freed_bytes: int


class _DryRunError(Exception):
    """Undoes a dry run's transaction."""


def check(
    store: OpenStore, *, read_data: bool, subset: tuple[int, int], on_file: Callable[[], None]
) -> CheckReport:
    """See `DiskStore.check`."""
    part, parts = subset
    if not 1 <= part <= parts:
        raise InvalidRequestError(
            f"subset must be (n, m) with n from 1 to m, got ({part}, {parts})"
        )
    checking = _Checking(store, read_data=read_data)
    try:
        for kind in Kind:
            for listed in store.entries.listed(kind):
                if _share(listed, parts) == part - 1:
                    checking.check(listed)
                    on_file()
    except OSError as error:
        raise StoreError(f"cannot read the store: {error}") from error
    return checking.report()


def collect(store: OpenStore, *, dry_run: bool, on_progress: OnProgress) -> CollectReport:
    try:
        with store.write_lock, store.folder.locked():
            return store.with_recovery(
                lambda: _collect(store, dry_run=dry_run, on_progress=on_progress)
            )
    except OSError as error:
        raise StoreError(f"cannot clean the store: {error}") from error


def _collect(store: OpenStore, *, dry_run: bool, on_progress: OnProgress) -> CollectReport:
    unfinished = store.folder.leftovers()
    if not dry_run:
        store.folder.reap()
    reports = []
    try:
        with store.index.writing() as db:
            reports.append(_delete(store, db, unfinished, on_progress, dry_run=dry_run))
            _roll_back_if(dry_run=dry_run)
    except _DryRunError:
        pass
    return reports[0]


def _delete(
    store: OpenStore,
    db: sqlite3.Connection,
    unfinished: int,
    on_progress: OnProgress,
    *,
    dry_run: bool,
) -> CollectReport:
    entries, quota = store.entries, store.quota
    before = quota.used(db)
    alive = [name for name, lives in store.folder.sessions().items() if lives]
    places = ",".join("?" * len(alive))
    sql = f"DELETE FROM reservations WHERE session NOT IN ({places})"  # noqa: S608
    db.execute(sql, alive)
    bad = entries.quarantined()
    for name in bad if not dry_run else ():
        entries.delete_quarantined(name)
    db.execute("DELETE FROM others WHERE name LIKE 'bad/%'")
    unneeded = block_rows.unneeded(db)
    for number, victim in enumerate(unneeded, 1):
        if not dry_run:
            entries.delete(block_entry(victim.key))
        block_rows.drop(db, victim.key)
        on_progress(number, len(unneeded))
    n_left = _count_blocks(db)
    quota.evict_until_fits(db, 0, delete=not dry_run)
    return CollectReport(
        dry_run=dry_run,
        unneeded_blocks=len(unneeded),
        unfinished_files=unfinished,
        damaged_files=len(bad),
        evicted_blocks=n_left - _count_blocks(db),
        freed_bytes=before - quota.used(db),
    )


class _Checking:
    def __init__(self, store: OpenStore, *, read_data: bool) -> None:
        self._store = store
        self._read_data = read_data
        self._n_blocks = 0
        self._n_manifests = 0
        self._n_bytes = 0
        self._damaged: list[Problem] = []
        self._foreign: list[str] = []
        self._newer: list[str] = []

    def check(self, listed: Listed) -> None:
        name = "" if listed.entry is None else listed.entry.name
        block, manifest = parse_block(name), parse_manifest(name)
        is_block = listed.path.startswith(f"{Kind.BLOCKS}/")
        try:
            if block is not None and is_block:
                self._check_block(block)
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

    def _check_block(self, key: BlockKey) -> None:
        if self._read_data:
            self._store.reader.check(key)
        else:
            self._store.reader.header(key)


def _roll_back_if(*, dry_run: bool) -> None:
    if dry_run:
        raise _DryRunError


def _share(listed: Listed, parts: int) -> int:
    # The hash in a file's name decides which part of the check has it.
    name = "" if listed.entry is None else listed.entry.name
    is_hash = parse_block(name) or parse_manifest(name)
    return int(name[:16], 16) % parts if is_hash else 0


def _count_blocks(db: sqlite3.Connection) -> int:
    return whole(db.execute("SELECT count(*) FROM blocks").fetchone()[0])
