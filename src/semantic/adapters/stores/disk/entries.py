"""Block and manifest files by name: opens, installs, deletes and quarantines them.

No text of a user becomes part of a path. Refuses symbolic links.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from semantic.adapters.stores.disk.files import (
    FOLDER_FLAGS,
    READ_FLAGS,
    FileSystem,
    delete_any,
    opened,
    sync_folder,
)
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.identity import digest

PAGE = 4096
"""The bytes of a page. File systems allocate whole pages."""
MAX_NUMBER = 1 << 62
"""The largest number accepted from a file. Twice this number still fits into the index."""
MAX_QUARANTINED = 16
"""The number of quarantined files to keep."""
_NAME_BYTES = 256
"""The maximum number of bytes that a name adds to its folder."""
_MAX_COST = 1 << 44
"""The largest cost of one file in bytes, above any quota."""
_NOT_PLAIN = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EOPNOTSUPP, errno.EMLINK}
_SHARD_NAME_LENGTH = 2
_LAST_NUMBER = 10**20 - 1
"""The last number of names in `bad/`, with 20 digits."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_BLOCK = re.compile(r"([0-9a-f]{64})\.(full|window|checkpoint)")
_MANIFEST = re.compile(r"([0-9a-f]{64})\.([0-9]{20})")


class UnreadableError(Exception):
    """The file is damaged, of a later version, or of another block."""


class DamagedError(UnreadableError):
    """The contents of a file are invalid. The message is the kind of damage."""

    @property
    def kind(self) -> str:
        return str(self)


class NewerFormatError(UnreadableError):
    """A later version wrote the file, which the store leaves alone."""


class MismatchError(UnreadableError):
    """An intact file belongs to another block. The message names the field that differs."""


class Kind(StrEnum):
    """The two kinds of files, each in a folder of 256 shards."""

    BLOCKS = "blocks"
    AGENTS = "agents"


@dataclass(frozen=True, slots=True)
class Entry:
    """The name of a file in a shard."""

    kind: Kind
    name: str

    @property
    def shard(self) -> str:
        return self.name[:2]

    def __str__(self) -> str:
        return f"{self.kind}/{self.shard}/{self.name}"


@dataclass(frozen=True, slots=True)
class Listed:
    """A file or folder in a shard. `n_bytes` is None for all but plain files of this user.

    `path` is relative to the store's folder. `entry` is None if the store cannot have written the
    file.
    """

    path: str
    entry: Entry | None
    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """The name and size of a file in `bad/`."""

    name: str
    n_bytes: int


def block_entry(key: BlockKey) -> Entry:
    return Entry(Kind.BLOCKS, f"{key.hash.hex()}.{key.part.value}")


def manifest_entry(agent: bytes, generation: int) -> Entry:
    return Entry(Kind.AGENTS, f"{agent.hex()}.{generation:020}")


def parse_block(name: str) -> BlockKey | None:
    """Return the key of the block whose file is called `name`, or None."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    return BlockKey(BlockHash(bytes.fromhex(match[1])), Part(match[2]))


def parse_manifest(name: str) -> tuple[bytes, int] | None:
    """Return the agent and the generation of the manifest whose file is called `name`, or None."""
    match = _MANIFEST.fullmatch(name)
    return None if match is None else (bytes.fromhex(match[1]), int(match[2]))


def agent_key(scope: Scope, agent_id: str) -> bytes:
    """Return the 32 bytes that identify an agent in file names."""
    name = agent_id.encode("utf-8", "surrogatepass")
    return digest("agent-v1", scope.namespace, scope.tenant, name)


def cost_of(n_bytes: int) -> int:
    """Return the bytes that a file of `n_bytes` takes on disk: whole pages and a name."""
    return min(-(-n_bytes // PAGE) * PAGE + _NAME_BYTES, _MAX_COST)


def escape_name(name: str) -> str:
    """Percent-encode a file name as printable text."""
    return quote(os.fsencode(name), safe=_PRINTABLE)


def unescape_name(text: str) -> str:
    """Return the name that `escape_name` encoded."""
    return os.fsdecode(unquote_to_bytes(text))


def is_plain(found: os.stat_result) -> bool:
    """Return whether `found` is a regular file of this user with one hard link."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()


class Entries:
    """The files below `root`, and the quarantine folder `bad/`."""

    def __init__(self, root: Path, files: FileSystem) -> None:
        self.root = root
        self.files = files

    @property
    def bad(self) -> Path:
        return self.root / "bad"

    # One file

    @contextmanager
    def opened(self, entry: Entry) -> Iterator[tuple[int, int]]:
        """Yield the file's descriptor and its size in bytes. Raises DamagedError unless it is a
        plain file, or OSError."""
        with self._shard(entry.kind, entry.shard) as shard:
            try:
                fd = self.files.open(entry.name, READ_FLAGS, dir_fd=shard)
            except OSError as error:
                if error.errno in _NOT_PLAIN:
                    raise DamagedError("not a plain file") from None
                raise
            try:
                found = self.files.fstat(fd)
                if not found.st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "evicted meanwhile", entry.name)
                if not is_plain(found):
                    raise DamagedError("not a plain file")
                yield fd, found.st_size
            finally:
                with suppress(OSError):  # reads only
                    self.files.close(fd)

    def size(self, entry: Entry) -> int | None:
        """Return the file's size in bytes; None unless it is a plain file."""
        try:
            with self._shard(entry.kind, entry.shard) as shard:
                found = self.files.lstat(entry.name, dir_fd=shard)
        except FileNotFoundError:
            return None
        return found.st_size if is_plain(found) else None

    def exists(self, entry: Entry) -> bool:
        """Return whether the name exists, as a file or anything else."""
        try:
            with self._shard(entry.kind, entry.shard) as shard:
                self.files.lstat(entry.name, dir_fd=shard)
        except FileNotFoundError:
            return False
        return True

    def install(self, temporary: Path, entry: Entry) -> None:
        """Atomically rename a finished file to its final name."""
        with suppress(FileExistsError):
            self.files.mkdir(self._folder(entry.kind, entry.shard))
        with self._shard(entry.kind, entry.shard) as shard:
            try:
                self.files.rename(temporary, entry.name, to=shard)
            except IsADirectoryError:
                self.quarantine(entry)
                self.files.rename(temporary, entry.name, to=shard)

    def delete(self, entry: Entry) -> None:
        """Delete the file or folder `entry`, if it exists."""
        with suppress(FileNotFoundError), self._shard(entry.kind, entry.shard) as shard:
            delete_any(self.files, entry.name, shard)

    def sync(self, entry: Entry) -> None:
        """Write the file's contents to the drive before the data of any later sync."""
        with self.opened(entry) as (fd, _):
            self.files.sync_data(fd)

    # Quarantine

    def quarantine(self, entry: Entry) -> Quarantined | None:
        """Move a file to `bad/`; return None if the file does not exist."""
        with opened(self.files, self.bad, FOLDER_FLAGS, reads=True) as bad:
            names = self.quarantined()
            # Numbered, not dated, so that the order does not depend on the clock.
            number = 1 + max((int(name[:20]) for name in names), default=0)
            name = f"{min(number, _LAST_NUMBER):020}-{entry.name}"
            if name in names:
                delete_any(self.files, name, bad)
            try:
                with self._shard(entry.kind, entry.shard) as shard:
                    found = self.files.lstat(entry.name, dir_fd=shard)
                    self.files.rename(entry.name, name, of=shard, to=bad)
            except FileNotFoundError:
                return None
            return Quarantined(name, found.st_size)

    def quarantined(self) -> list[str]:
        """Return the names in `bad/`, oldest first."""
        names = self.files.names(self.bad)
        return sorted(name for name in names if name[:20].isdecimal() and name[20:21] == "-")

    def delete_quarantined(self, name: str) -> None:
        """Delete a quarantined file, if it exists."""
        with (
            suppress(FileNotFoundError),
            opened(self.files, self.bad, FOLDER_FLAGS, reads=True) as bad,
        ):
            delete_any(self.files, name, bad)

    # Shards

    def shards(self, kind: Kind) -> list[str]:
        names = self.files.names(self.root / kind.value)
        return sorted(name for name in names if len(name) == _SHARD_NAME_LENGTH)

    def listed(self, kind: Kind) -> Iterator[Listed]:
        """Yield each file and folder in the shards of `kind`."""
        for name in self.shards(kind):
            try:
                with self._shard(kind, name) as shard:
                    yield from self._listed_shard(kind, name, shard)
            except NotADirectoryError:
                continue  # a link or file in place of a shard: not part of the store

    def sync_shard(self, kind: Kind, shard: str) -> None:
        """Make the names in the shard survive power loss."""
        sync_folder(self.files, self._folder(kind, shard))
        sync_folder(self.files, self.root / kind.value)

    def _listed_shard(self, kind: Kind, shard_name: str, shard: int) -> Iterator[Listed]:
        for name in self.files.names(shard):
            try:
                found = self.files.lstat(name, dir_fd=shard)
            except FileNotFoundError:
                continue  # another process evicted it meanwhile
            foreign = stat.S_ISDIR(found.st_mode) or name[:2] != shard_name
            yield Listed(
                escape_name(f"{kind}/{shard_name}/{name}"),
                None if foreign else Entry(kind, name),
                found.st_size if is_plain(found) else None,
            )

    def _folder(self, kind: Kind, shard: str) -> Path:
        return self.root / kind.value / shard

    def _shard(self, kind: Kind, shard: str) -> AbstractContextManager[int]:
        return opened(self.files, self._folder(kind, shard), FOLDER_FLAGS, reads=True)
