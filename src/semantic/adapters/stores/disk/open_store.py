"""The shared state of an open disk store, and its recovery after a crash.

A cleanly closed store has a seal, a checksum over the index and the folders. If the seal matches,
the next opening does not compare every file with the index.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from semantic.adapters.stores.disk import agent_rows, block_rows, quota, schema
from semantic.adapters.stores.disk.block_file import HEADER_BYTES, BlockReader
from semantic.adapters.stores.disk.entries import (
    MAX_NUMBER,
    MAX_QUARANTINED,
    PAGE,
    DamagedError,
    Entries,
    Entry,
    Kind,
    NewerFormatError,
    cost_of,
    escape_name,
    manifest_entry,
    parse_block,
    parse_manifest,
)
from semantic.adapters.stores.disk.files import READ_FLAGS, Counts, FileSystem, opened, read_whole
from semantic.adapters.stores.disk.folder import Folder, open_folder
from semantic.adapters.stores.disk.index import Index
from semantic.adapters.stores.disk.manifest_file import (
    FRAME_BYTES,
    FiledManifest,
    ManifestFile,
    read_manifest,
)
from semantic.adapters.stores.disk.quota import Quota, WriteLedger, WriteLimits
from semantic.adapters.stores.disk.schema import IndexBrokenError, number
from semantic.domain.block_hash import PUBLIC_TENANT, BlockHash, tenant_tag
from semantic.domain.errors import InvalidRequestError, StoreError
from semantic.domain.stored import BlockHeader, Tier
from semantic.ports.store import BlockObserver


def quarantine(db: sqlite3.Connection, entries: Entries, entry: Entry) -> None:
    """Move a damaged file to `bad/` and drop its row. The file still counts against the quota."""
    moved = entries.quarantine(entry)
    key, manifest = parse_block(entry.name), parse_manifest(entry.name)
    if key is not None:
        block_rows.drop(db, key)
    if manifest is not None and manifest[1] <= MAX_NUMBER:
        agent_rows.drop_generation(db, *manifest)
    if moved is not None:
        _add_other(db, escape_name(f"bad/{moved.name}"), cost_of(moved.n_bytes))
    for name in entries.quarantined()[:-MAX_QUARANTINED]:
        entries.delete_quarantined(name)
        db.execute("DELETE FROM others WHERE name = ?", (escape_name(f"bad/{name}"),))


@dataclass(frozen=True, slots=True)
class Recovery:
    """Makes the index match the files, in one transaction. Quarantines damaged files. A caller may
    interrupt and repeat the recovery."""

    _db: sqlite3.Connection
    _folder: Folder
    _entries: Entries
    _reader: BlockReader
    _counts: Counts

    def run(self) -> None:
        """Run the recovery. Raises OSError or IndexBrokenError."""
        schema.verify_rows(self._db)
        self.sessions()
        self._db.execute("DELETE FROM others")
        self._recover_quarantined()
        self._recover_blocks()
        self._recover_agents()
        self._recompute_sums()

    def sessions(self) -> None:
        """Clean up after dead processes, without comparing files."""
        self._folder.reap()
        alive = set(self._folder.sessions())
        rows = self._db.execute("SELECT DISTINCT session FROM reservations").fetchall()
        known = {str(row[0]) for row in rows}
        for session in known - alive:
            self._db.execute("DELETE FROM reservations WHERE session = ?", (session,))
        for session in alive - known:
            self._db.execute(
                "INSERT INTO reservations(session, cost) VALUES (?, ?)", (session, quota.SESSION)
            )

    def _recover_quarantined(self) -> None:
        for name in self._entries.quarantined():
            with suppress(FileNotFoundError):
                size = self._entries.files.lstat(self._entries.bad / name).st_size
                _add_other(self._db, escape_name(f"bad/{name}"), cost_of(size))

    def _recover_blocks(self) -> None:
        known = block_rows.all_sizes(self._db)
        for listed in self._entries.listed(Kind.BLOCKS):
            key = None if listed.entry is None else parse_block(listed.entry.name)
            if key is None or listed.entry is None:
                _add_other(self._db, listed.path, cost_of(listed.n_bytes or PAGE))
                continue
            size = known.pop(key, None)
            if size is not None and size == listed.n_bytes:
                continue
            block_rows.drop(self._db, key)
            try:
                found = self._reader.header(key)
            except (DamagedError, NewerFormatError, OSError) as error:
                self._exclude(listed.entry, listed.n_bytes or 0, error)
                continue
            used = 1 + block_rows.tick(self._db)
            block_rows.add(self._db, found.header, found.body_bytes, used)
        for key in known:
            block_rows.drop(self._db, key)

    def _recover_agents(self) -> None:
        known = agent_rows.all_manifests(self._db)
        there: dict[tuple[bytes, int], tuple[int, bytes]] = {}
        for listed in self._entries.listed(Kind.AGENTS):
            parsed = None if listed.entry is None else parse_manifest(listed.entry.name)
            if parsed is None:
                _add_other(self._db, listed.path, cost_of(listed.n_bytes or PAGE))
            else:
                there[parsed] = cost_of(listed.n_bytes or 0), self._frame(*parsed)
        changed = {key for key, _ in known.items() ^ there.items()}
        generations: dict[bytes, list[int]] = {}
        for key, generation in sorted(there):
            generations.setdefault(key, []).append(generation)
        read = []
        for agent in {key for key, _ in changed}.union(agent_rows.outdated(self._db)):
            agent_rows.drop(self._db, agent)
            read += self._read_agent(agent, generations.get(agent, []))
        # In the order of saving, so that an agent's newest manifest is the last one added for it,
        # and the last saved agent becomes the most recently used.
        for filed, file in sorted(read, key=lambda one: (one[0].order, one[0].manifest.generation)):
            hashes = agent_rows.add(self._db, filed, file)
            block_rows.touch_chain(self._db, hashes)
            self._db.execute(
                "UPDATE numbers SET value = max(value, ?) WHERE name = 'clock'", (filed.order,)
            )

        block_rows.update_all_pins(self._db)

    def _frame(self, agent: bytes, generation: int) -> bytes:
        # b"" matches no row
        try:
            with self._entries.opened(manifest_entry(agent, generation)) as (fd, _):
                return read_whole(self._entries.files, fd, FRAME_BYTES)
        except (DamagedError, OSError):
            return b""

    def _read_agent(
        self, agent: bytes, generations: list[int]
    ) -> list[tuple[FiledManifest, ManifestFile]]:
        read = []
        for generation in generations:
            try:
                read.append(read_manifest(self._entries, agent, generation))
            except (DamagedError, NewerFormatError, OSError) as error:
                self._exclude(manifest_entry(agent, generation), 0, error)
        return read

    def _recompute_sums(self) -> None:
        self._db.execute("DELETE FROM shards")
        for kind in Kind:
            for name in self._entries.shards(kind):
                self._db.execute("INSERT INTO shards VALUES (?)", (escape_name(f"{kind}/{name}"),))
        for n_bytes, cost in self._db.execute(
            "SELECT DISTINCT body_bytes, cost FROM blocks"
        ).fetchall():
            right = cost_of(HEADER_BYTES + n_bytes)
            if cost != right:
                self._db.execute(
                    "UPDATE blocks SET cost = ? WHERE body_bytes = ?", (right, n_bytes)
                )
        schema.recount(self._db)
        self._db.execute(
            "UPDATE numbers SET value = max(value, (SELECT coalesce(max(used), 0) FROM blocks))"
            " WHERE name = 'clock'"
        )

    def _exclude(
        self, entry: Entry, n_bytes: int, error: DamagedError | NewerFormatError | OSError
    ) -> None:
        """Count an unusable file against the quota. Quarantine only a damaged file."""
        match error:
            case DamagedError():
                self._counts.add("damaged", error.kind)
                quarantine(self._db, self._entries, entry)
                return
            case NewerFormatError():
                self._counts.add("newer format")
            case OSError():
                self._counts.add_error("read_errors", error)
        _add_other(self._db, str(entry), cost_of(n_bytes))


def _add_other(db: sqlite3.Connection, name: str, cost: int) -> None:
    # Delete before inserting: the triggers that maintain the sum fire on DELETE and INSERT only.
    db.execute("DELETE FROM others WHERE name = ?", (name,))
    db.execute("INSERT INTO others VALUES (?, ?)", (name, cost))


SEALED_FROM = 2000
"""The minimum number of files for a seal. Comparing fewer files takes less than 0.1 s."""

_NAME = "index.seal"
_TABLES = "index.sqlite"
_LOGS = ("index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal")
_FOLDERS = ("blocks", "agents", "bad")
_SEAL_BYTES = 16
_READ_BYTES = 1 << 20


class Seal:
    """The seal of a folder. Callers hold the folder's lock, and have not opened the index."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files = folder.files
        self._path = folder.root / _NAME

    def take(self) -> bool:
        """Remove the seal; return whether it matched."""
        try:
            with opened(self._files, self._path, READ_FLAGS, reads=True) as fd:
                sealed = read_whole(self._files, fd, _SEAL_BYTES + 1)
            self._files.unlink(self._path)
            return self._is_alone() and sealed == self._checksum()
        except OSError:
            return False

    def put(self) -> None:
        """Seal the folder, unless another process has it open. Raises nothing."""
        with suppress(OSError):
            if self._is_alone():
                checksum = self._checksum()
                with suppress(FileNotFoundError):
                    self._files.unlink(self._path)
                self._folder.create(self._path, checksum)

    def _is_alone(self) -> bool:
        # With another session in this process, reading the index's file would release SQLite's
        # locks.
        return [name for name, lives in self._folder.sessions().items() if lives] == [
            self._folder.session
        ]

    def _checksum(self) -> bytes:
        # Raises OSError, also if the index has a log, the sign of an unclean close
        for name in _LOGS:
            with suppress(FileNotFoundError):
                self._files.lstat(self._folder.root / name)
                raise OSError(f"{name} exists")
        hashed = xxhash.xxh3_128(f"seal-v1 {schema.VERSION} {schema.SCRIPT}".encode())
        for line in self._folders():
            hashed.update(line)
        with opened(self._files, self._folder.root / _TABLES, READ_FLAGS, reads=True) as fd:
            chunk = memoryview(bytearray(_READ_BYTES))
            at = 0
            while n := self._files.preadv(fd, [chunk], at):
                hashed.update(chunk[:n])
                at += n
        return hashed.digest()

    def _folders(self) -> Iterator[bytes]:
        for name in _FOLDERS:
            folder = self._folder.root / name
            inside = () if name == "bad" else sorted(self._files.names(folder))
            for path in (folder, *(folder / one for one in inside)):
                found = self._files.lstat(path)
                values = (found.st_ino, found.st_mode, found.st_mtime_ns, found.st_ctime_ns)
                yield f"{path.name} {values}\n".encode(errors="surrogateescape")


T = TypeVar("T")

Limit = int | Callable[[int], int]
"""A quota in bytes, or a function of the folder's bytes."""
_RECOVERY_SECONDS = 60.0
"""The longest wait for the folder's lock, in seconds."""
_OPENING_SECONDS = 30.0
"""The seconds to wait for an index that another process has locked."""
_PAUSE_SECONDS = 0.05
_MORE_TRIES = 6
"""The number of tries after a failed rebuild of the index."""


class OpenStore:
    """An open folder with an index that fits its files."""

    def __init__(
        self,
        root: Path,
        max_bytes: Limit,
        files: FileSystem,
        *,
        durable: bool,
        secret: bytes | None = None,
        writes: WriteLimits,
        observer: BlockObserver | None = None,
    ) -> None:
        """Open the store. Raises StoreError and changes nothing if the folder is unusable."""
        if isinstance(max_bytes, int) and max_bytes < 1:
            raise InvalidRequestError(f"max_bytes must be at least 1, got {max_bytes}")
        self.durable = durable
        self.counts = Counts()
        self.write_lock = threading.RLock()
        self.folder = open_folder(root, files)
        self.secret = self.folder.secret if secret is None else secret
        self.written = WriteLedger(self.folder, writes, durable=durable)
        self.entries = Entries(root, files)
        self.reader = BlockReader(self.entries)
        self._observer = observer
        self.index = Index(self.folder, None if observer is None else self._removed)
        self._seal = Seal(self.folder)
        self._opened = False
        known = max_bytes if isinstance(max_bytes, int) else 1  # opening evicts nothing
        public = tenant_tag(self.secret, PUBLIC_TENANT)
        self.quota = Quota(self.index, self.entries, self.counts, known, public=public)
        try:
            self._open_when_free()
            if not isinstance(max_bytes, int):
                with self.index.reading() as db:
                    self.quota.max_bytes = max(1, max_bytes(self.quota.used(db)))
            self._opened = True
        except (OSError, IndexBrokenError) as error:
            self.close()
            raise StoreError(f"cannot read the store {root}: {error}") from error

    def _open_when_free(self) -> None:
        until = time.monotonic() + _OPENING_SECONDS
        while True:
            try:
                self._open()
            except OSError as error:
                if error.errno != errno.EAGAIN or time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def _open(self) -> None:
        # With a valid seal, only clean up after dead processes.
        with self.folder.locked(_RECOVERY_SECONDS):
            if self._seal.take():
                with suppress(IndexBrokenError), self.index.writing() as db:
                    self._recovery(db).sessions()
                    return
            self.recover()

    def recover(self) -> None:
        """Make the index match the files. Raises OSError or IndexBrokenError."""
        with self.folder.locked(_RECOVERY_SECONDS):
            if self.index.is_sound():
                with suppress(IndexBrokenError):
                    with self.index.writing() as db:
                        self._recovery(db).run()
                    self._list_anew()
                    return
            self.rebuild()

    def rebuild(self) -> None:
        """Build a new index from the files. Raises OSError or IndexBrokenError."""
        with self.folder.locked(_RECOVERY_SECONDS), self.index.recreating() as db:
            self._recovery(db).run()
        self._list_anew()

    def with_recovery(self, action: Callable[[], T]) -> T:
        """Run `action`. If the index is broken, repair it and try again. Raises OSError if every
        try fails."""
        try:
            return action()
        except IndexBrokenError as broken:
            self.counts.add("index mended")
            error = broken
        for mend in (self.recover, self.rebuild, *(self.recover,) * _MORE_TRIES):
            try:
                mend()
                return action()
            except IndexBrokenError as broken:
                error = broken
        raise OSError(errno.EIO, f"the index: {error}") from error

    def quarantine(self, entry: Entry, damage: DamagedError) -> None:
        """Move a damaged file to `bad/`. Raises nothing."""
        self.counts.add("damaged", damage.kind)
        try:
            self.with_recovery(lambda: self._quarantine(entry))
        except OSError as error:
            self.counts.add_error("write_errors", error)

    def stored(self, header: BlockHeader) -> None:
        """Report a committed block to the observer. Callers hold the folder's lock."""
        if self._observer is None or not header.is_whole_block:
            return
        if not self._observer.stored(header, Tier.DISK):
            self.counts.add("unpublished")

    def _removed(self, names: Sequence[BlockHash]) -> None:
        if self._observer is None:
            return
        for name in names:
            if not self._observer.removed(name, Tier.DISK):
                self.counts.add("unpublished")

    def _list_anew(self) -> None:
        if self._observer is not None:
            self._observer.listed_anew()

    def release(self, reservation: int) -> None:
        """Release a reservation after a failed write. Raises nothing."""
        with suppress(OSError, IndexBrokenError), self.index.writing() as db:
            self.quota.release(db, reservation)

    def unlink_uncommitted(self, entry: Entry) -> None:
        """Delete a file whose row was not committed."""
        with suppress(OSError):
            self.entries.delete(entry)

    def close(self) -> None:
        """Release all resources and delete this process's unfinished files."""
        self.reader.close()
        self.written.settle()
        is_large = False
        with suppress(OSError, IndexBrokenError), self.index.writing() as db:
            db.execute("DELETE FROM reservations WHERE session = ?", (self.folder.session,))
            is_large = number(db, "blocks") + number(db, "agents") >= SEALED_FROM
        self.index.close()
        if is_large and self._opened and not self._has_failed():
            with suppress(OSError), self.folder.locked():
                self._seal.put()
        self.folder.close()

    def _has_failed(self) -> bool:
        # A failed write or a broken index may have left a file without a row.
        counts = self.counts.snapshot()
        return any(counts.get(name) for name in ("write_errors", "index mended"))

    def _recovery(self, db: sqlite3.Connection) -> Recovery:
        return Recovery(db, self.folder, self.entries, self.reader, self.counts)

    def _quarantine(self, entry: Entry) -> None:
        with self.index.writing() as db:
            quarantine(db, self.entries, entry)
