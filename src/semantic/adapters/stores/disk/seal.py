"""The seal of a store that was closed in order: its index need not be compared with every file.

A checksum over the index and over what the file system says of each folder: the time of the last
name that came or went. It is deleted before the index is used, and written when the last process
closes the store, so after a crash there is none. Whatever does not match is recovered as without a
seal. A file that was changed in place under its own name is noticed when it is read, not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import xxhash

from semantic.adapters.stores.disk import schema
from semantic.adapters.stores.disk.files import READ_FLAGS, opened_to_read, read_whole
from semantic.adapters.stores.disk.folder import Folder

SEALED_FROM = 2000
"""Files from which a store is sealed: fewer are compared in less than a tenth of a second."""

_NAME = "index.seal"
_TABLES = "index.sqlite"
_LOGS = ("index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal")
_FOLDERS = ("blocks", "agents", "bad")
_SEAL_BYTES = 16
_READ_BYTES = 1 << 20


class Seal:
    """The seal of an open folder. The folder's lock must be held, and no index be open."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files = folder.files
        self._path = folder.root / _NAME

    def take(self) -> bool:
        """Whether index and folders are as they were sealed. There is no seal afterwards."""
        try:
            with opened_to_read(self._files, self._path, READ_FLAGS) as fd:
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
        """Whether this is the only session: closing a file that SQLite has open elsewhere in this
        process would release SQLite's locks."""
        return [name for name, lives in self._folder.sessions().items() if lives] == [
            self._folder.session
        ]

    def _checksum(self) -> bytes:
        """Raises OSError, also when the index has a log, which means that it was not closed."""
        for name in _LOGS:
            with suppress(FileNotFoundError):
                self._files.lstat(self._folder.root / name)
                raise OSError(f"{name} exists")
        hashed = xxhash.xxh3_128(f"seal-v1 {schema.VERSION} {schema.SCRIPT}".encode())
        for line in self._folders():
            hashed.update(line)
        with opened_to_read(self._files, self._folder.root / _TABLES, READ_FLAGS) as fd:
            chunk = memoryview(bytearray(_READ_BYTES))
            at = 0
            while n := self._files.preadv(fd, [chunk], at):
                hashed.update(chunk[:n])
                at += n
        return hashed.digest()

    def _folders(self) -> Iterator[bytes]:
        """Each folder with files, its identity and when a name in it last came or went."""
        for name in _FOLDERS:
            folder = self._folder.root / name
            inside = () if name == "bad" else sorted(self._files.names(folder))
            for path in (folder, *(folder / one for one in inside)):
                found = self._files.lstat(path)
                values = (found.st_ino, found.st_mode, found.st_mtime_ns, found.st_ctime_ns)
                yield f"{path.name} {values}\n".encode(errors="surrogateescape")
