"""The four files of the index: whether they may be opened, which they are, what they count for.

Looks at their names only: whoever opens and closes a file that SQLite has open in the same process
takes SQLite's locks away. Knows nothing of what is in them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

from semantic.adapters.stores.disk.entries import is_plain
from semantic.adapters.stores.disk.files import CREATE_FLAGS, FOLDER_FLAGS, opened
from semantic.adapters.stores.disk.folder import Folder

_NAMES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "index.sqlite-journal")
_OPEN_TOGETHER = 4
"""Descriptors that SQLite needs at once, with one to spare."""
_OWNER_MAY_USE = stat.S_IRUSR | stat.S_IWUSR
_ROOM = 1 << 20
"""The least that the index counts for."""
_SLACK = 1 << 19
"""What it may grow by before that is noticed: a checkpoint copies the log into the table file."""

FileId = tuple[int, int]
"""Device and number."""
Identity = tuple[FileId, FileId | None, FileId | None]
"""The table file, its log and the log's map."""


class _UnfitError(Exception):
    """Something that is no plain file of ours has a name of the index's."""


class IndexFiles:
    """The index's files in an open folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._files = folder.files
        self.path = folder.root / _NAMES[0]

    def identity(self) -> Identity | None:
        """Which files there are; None unless all may be opened and the first is there.

        A link would lead SQLite out of the folder, a second name would let it write into somebody
        else's file, and at a FIFO it would wait for ever.
        """
        try:
            table = self._id(_NAMES[0])
            log, log_map, _ = map(self._id, _NAMES[1:])
        except _UnfitError:
            return None
        if table is None:
            self._files.lstat(self._folder.root)  # without its folder it cannot be made anew
            return None
        return table, log, log_map

    def has_table(self, table: FileId) -> bool:
        """Whether the first file is still that one: a shorter look."""
        try:
            return self._id(_NAMES[0]) == table
        except _UnfitError:
            return False

    def begin_anew(self) -> None:
        """Take away whatever has the four names and make an empty first file.

        The folder's lock must be held. Raises OSError.
        """
        for name in _NAMES:
            with suppress(FileNotFoundError):
                self._take_away(self._folder.root / name)
        # Made here, so that SQLite's own files take over its permissions.
        self._files.close(self._files.open(self.path, CREATE_FLAGS))

    def cost(self) -> int:
        """Bytes to count for the index, with room to grow in."""
        actual = 0
        for name in _NAMES:
            with suppress(FileNotFoundError):
                actual += self._files.lstat(self._folder.root / name).st_size
        return max(_ROOM, actual + _SLACK)

    def require_folder(self) -> None:
        """Raise the OSError that explains why nothing can be opened or written in the folder.

        SQLite does not say why. Returns when the folder is not to blame.
        """
        with ExitStack() as stack:
            for _ in range(_OPEN_TOGETHER):
                fd = stack.enter_context(opened(self._files, self._folder.root, FOLDER_FLAGS))
            mode = self._files.fstat(fd).st_mode
        if not (mode & stat.S_IWUSR and mode & stat.S_IXUSR):
            raise OSError(
                errno.EACCES,
                f"{os.strerror(errno.EACCES)}: {self._folder.root} has mode "
                f"{stat.S_IMODE(mode):04o}; expected a folder that its owner can write to",
            )

    def _id(self, name: str) -> FileId | None:
        """Raises _UnfitError for what must not be opened."""
        try:
            found = self._files.lstat(self._folder.root / name)
        except FileNotFoundError:
            return None
        if not is_plain(found) or found.st_mode & _OWNER_MAY_USE != _OWNER_MAY_USE:
            raise _UnfitError
        return found.st_dev, found.st_ino

    def _take_away(self, path: Path) -> None:
        if not stat.S_ISDIR(self._files.lstat(path).st_mode):
            self._files.unlink(path)
            return
        # Not ours to empty. With this number it is the first of the damaged to go for room.
        name = f"{0:020}-{secrets.token_hex(8)}-{path.name}"
        with opened(self._files, self._folder.root / "bad", FOLDER_FLAGS) as bad:
            self._files.rename(path, name, to=bad)
