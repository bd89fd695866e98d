"""What the parts of an open disk store share: folder, files, index, budget, and mending.

Knows how the index is rebuilt and where damaged files go; not what a block or an agent is for.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from semantic.adapters.stores.disk.block_file import BlockReader
from semantic.adapters.stores.disk.entries import DamagedError, Entries, Entry
from semantic.adapters.stores.disk.files import Counts, FileSystem
from semantic.adapters.stores.disk.folder import open_folder
from semantic.adapters.stores.disk.index import Index
from semantic.adapters.stores.disk.quota import Room
from semantic.adapters.stores.disk.recovery import Reconciler, put_aside
from semantic.adapters.stores.disk.schema import IndexBrokenError
from semantic.domain.errors import InvalidRequestError, StoreError

T = TypeVar("T")

_MEND_SECONDS = 60.0


class OpenStore:
    """An opened folder with its index in order.

    `changing` is held by whoever writes a file: one at a time in this process.
    """

    def __init__(self, root: Path, max_bytes: int, files: FileSystem, *, durable: bool) -> None:
        """Raises StoreError when the folder cannot be used, before anything in it is changed."""
        if max_bytes < 1:
            raise InvalidRequestError(f"max_bytes must be at least 1, got {max_bytes}")
        self.durable = durable
        self.counts = Counts()
        self.changing = threading.RLock()
        self.folder = open_folder(root, files)
        self.entries = Entries(root, files)
        self.reader = BlockReader(self.entries)
        self.index = Index(self.folder)
        self.room = Room(self.index, self.entries, self.counts, max_bytes)
        try:
            self.mend()
        except (OSError, IndexBrokenError) as error:
            self.close()
            raise StoreError(f"the store {root} cannot be read: {error}") from error

    def mend(self) -> None:
        """Make the index say what the files say; rebuild it when it is broken.

        Raises OSError, or IndexBrokenError when even a new one is broken.
        """
        with self.folder.locked(_MEND_SECONDS):
            if self.index.is_sound():
                with suppress(IndexBrokenError):
                    self._reconcile()
                    return
            self.rebuild()

    def rebuild(self) -> None:
        """Throw the index away and derive it from the files. Raises as `mend` does."""
        with self.folder.locked(_MEND_SECONDS), self.index.recreating() as db:
            self._reconciler(db).run()

    def on_index(self, action: Callable[[], T]) -> T:
        """`action`, once more with a mended index when that was broken, and with a new one.

        Raises OSError, also when nothing of that helped.
        """
        try:
            return action()
        except IndexBrokenError:
            self.counts.add("index mended")
        try:
            with suppress(IndexBrokenError):
                self.mend()
                return action()
            self.rebuild()
            return action()
        except IndexBrokenError as error:
            raise OSError(errno.EIO, f"the index: {error}") from error

    def put_aside(self, entry: Entry, damage: DamagedError) -> None:
        """Count a damaged file and move it out of the way."""
        self.counts.add("damaged", damage.kind)
        try:
            self.on_index(lambda: self._put_aside(entry))
        except OSError as error:
            self.counts.add_error("write_errors", error)

    def release(self, reservation: int) -> None:
        """Give room back that a file which could not be written has reserved."""
        with suppress(OSError, IndexBrokenError), self.index.writing() as db:
            self.room.release(db, reservation)

    def delete_unremembered(self, entry: Entry) -> None:
        """Delete a file whose row could not be written: it must not lie there uncounted."""
        with suppress(OSError):
            self.entries.delete(entry)

    def close(self) -> None:
        """Let go of everything; unfinished files of this process go."""
        self.reader.close()
        with suppress(OSError, IndexBrokenError), self.index.writing() as db:
            db.execute("DELETE FROM reservations WHERE session = ?", (self.folder.session,))
        self.index.close()
        self.folder.close()

    def _reconcile(self) -> None:
        with self.index.writing() as db:
            self._reconciler(db).run()

    def _reconciler(self, db: sqlite3.Connection) -> Reconciler:
        return Reconciler(db, self.folder, self.entries, self.reader, self.counts)

    def _put_aside(self, entry: Entry) -> None:
        with self.index.writing() as db:
            put_aside(db, self.entries, entry)
