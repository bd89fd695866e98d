"""Crash recovery: brings the index in line with the files, on each open and when it is broken.

The files are the source of truth. Deletes only what dead processes left unfinished; damaged files
are quarantined. Idempotent: interrupted anywhere, it runs again from the start.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress

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
from semantic.adapters.stores.disk.files import Counts, read_whole
from semantic.adapters.stores.disk.folder import Folder
from semantic.adapters.stores.disk.manifest_file import (
    FRAME_BYTES,
    FiledManifest,
    ManifestFile,
    read_manifest,
)


def quarantine(db: sqlite3.Connection, entries: Entries, entry: Entry) -> None:
    """Move a damaged file to `bad/` and drop its row; its cost still counts against the quota."""
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


class Recovery:
    """One pass over the folder, inside one transaction."""

    def __init__(
        self,
        db: sqlite3.Connection,
        folder: Folder,
        entries: Entries,
        reader: BlockReader,
        counts: Counts,
    ) -> None:
        self._db = db
        self._folder = folder
        self._entries = entries
        self._reader = reader
        self._counts = counts

    def run(self) -> None:
        """Raises OSError when the folder cannot be read, and IndexBrokenError for wrong rows."""
        schema.verify_rows(self._db)
        self.sessions()
        self._db.execute("DELETE FROM others")
        self._recover_quarantined()
        self._recover_blocks()
        self._recover_agents()
        self._recompute_sums()

    def sessions(self) -> None:
        """Only the sessions: delete unfinished files and reservations of dead processes."""
        self._folder.reap()
        alive = set(self._folder.sessions())
        rows = self._db.execute("SELECT DISTINCT session FROM reservations").fetchall()
        known = {str(row[0]) for row in rows}
        for session in known - alive:
            self._db.execute("DELETE FROM reservations WHERE session = ?", (session,))
        for session in alive - known:
            self._db.execute(
                "INSERT INTO reservations(session, cost) VALUES (?, ?)",
                (session, quota.SESSION),
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
        # In the order in which they were saved: an agent's newest last, and the last saved agent
        # becomes the most recently used.
        for filed, file in sorted(read, key=lambda one: (one[0].order, one[0].manifest.generation)):
            hashes = agent_rows.add(self._db, filed, file)
            block_rows.touch_chain(self._db, hashes)
            self._db.execute(
                "UPDATE numbers SET value = max(value, ?) WHERE name = 'clock'",
                (filed.order,),
            )

        block_rows.update_all_pins(self._db)

    def _frame(self, agent: bytes, generation: int) -> bytes:
        """The first bytes of a manifest's file; b"", which no row has, when it is unreadable."""
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
        self,
        entry: Entry,
        n_bytes: int,
        error: DamagedError | NewerFormatError | OSError,
    ) -> None:
        """An unusable file gets no row: quarantined when damaged, else left in place. It counts."""
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
    # Deleted first: the triggers that maintain the sum fire on DELETE and INSERT only.
    db.execute("DELETE FROM others WHERE name = ?", (name,))
    db.execute("INSERT INTO others VALUES (?, ?)", (name, cost))
