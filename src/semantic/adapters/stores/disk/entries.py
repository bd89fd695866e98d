"""The files of blocks and manifests: opened, put in place, deleted, put aside. Never followed.

Every file is reached through its shard's own descriptor, so that a symbolic link in place of a
shard or file is refused wherever it points. Knows names, not what is in a file.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from semantic.adapters.stores.disk.files import (
    FOLDER_FLAGS,
    READ_FLAGS,
    FileSystem,
    delete_any,
    opened_to_read,
    sync_folder,
)
from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.digest import digest

KEPT_BAD = 16
"""Files that are kept aside for a person to look at; the newest."""
_NOT_PLAIN = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EOPNOTSUPP, errno.EMLINK}
_SHARD_NAME_LENGTH = 2
_LAST_NUMBER = 10**20 - 1
"""Of files in `bad/`: beyond it names would no longer be in order."""


@dataclass(frozen=True, slots=True)
class Listed:
    """What was found in a shard. `n_bytes` is None when it is no plain file of ours.

    `path` begins at the store's folder and is plain text, see `shown`; `entry` is None for what
    cannot be ours: a folder, or a file in another shard than its name says.
    """

    path: str
    entry: Entry | None
    n_bytes: int | None


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that is in `bad/` now, and its size."""

    name: str
    n_bytes: int


def is_plain(found: os.stat_result) -> bool:
    """Whether it is a regular file of ours that has no second name."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()


class Entries:
    """The two sharded folders below `root`, and `bad/` beside them."""

    def __init__(self, root: Path, files: FileSystem) -> None:
        self.root = root
        self.files = files

    @property
    def bad(self) -> Path:
        return self.root / "bad"

    # One file

    @contextmanager
    def opened(self, entry: Entry) -> Iterator[tuple[int, int]]:
        """Descriptor and size. Raises DamagedError unless it is a plain file, or OSError."""
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
                with suppress(OSError):  # nothing was written through it
                    self.files.close(fd)

    def size(self, entry: Entry) -> int | None:
        """Bytes of the file; None when there is none, or no plain one."""
        try:
            with self._shard(entry.kind, entry.shard) as shard:
                found = self.files.lstat(entry.name, dir_fd=shard)
        except FileNotFoundError:
            return None
        return found.st_size if is_plain(found) else None

    def exists(self, entry: Entry) -> bool:
        """Whether anything has that name."""
        try:
            with self._shard(entry.kind, entry.shard) as shard:
                self.files.lstat(entry.name, dir_fd=shard)
        except FileNotFoundError:
            return False
        return True

    def install(self, temporary: Path, entry: Entry) -> None:
        """Rename a finished file into its place, in one step; a folder there is put aside."""
        with suppress(FileExistsError):
            self.files.mkdir(self._folder(entry.kind, entry.shard))
        with self._shard(entry.kind, entry.shard) as shard:
            try:
                self.files.rename(temporary, entry.name, to=shard)
            except IsADirectoryError:
                self.put_aside(entry)
                self.files.rename(temporary, entry.name, to=shard)

    def delete(self, entry: Entry) -> None:
        """Delete the file, or whatever has its name, if it is there."""
        with suppress(FileNotFoundError), self._shard(entry.kind, entry.shard) as shard:
            delete_any(self.files, entry.name, shard)

    def put_aside(self, entry: Entry) -> SetAside | None:
        """Move whatever has that name to `bad/`; None when nothing has."""
        with opened_to_read(self.files, self.bad, FOLDER_FLAGS) as bad:
            names = self.bad_names()
            # Numbered rather than dated: the newest is known without a clock.
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
            return SetAside(name, found.st_size)

    def bad_names(self) -> list[str]:
        """What was put aside, the oldest first."""
        names = self.files.names(self.bad)
        return sorted(name for name in names if name[:20].isdecimal() and name[20:21] == "-")

    def delete_bad(self, name: str) -> None:
        """Delete what was put aside, also when it is a folder."""
        with (
            suppress(FileNotFoundError),
            opened_to_read(self.files, self.bad, FOLDER_FLAGS) as bad,
        ):
            delete_any(self.files, name, bad)

    # Many

    def shards(self, kind: Kind) -> list[str]:
        """The shards that there are."""
        names = self.files.names(self.root / kind.value)
        return sorted(name for name in names if len(name) == _SHARD_NAME_LENGTH)

    def listed(self, kind: Kind) -> Iterator[Listed]:
        """All that lies in the shards of `kind`, whatever it is called."""
        for name in self.shards(kind):
            try:
                with self._shard(kind, name) as shard:
                    yield from self._listed_shard(kind, name, shard)
            except NotADirectoryError:
                continue  # a link or file where a shard should be: nothing in it is ours

    def sync(self, entry: Entry) -> None:
        """The contents of the file are on the drive before what is synced later."""
        with self.opened(entry) as (fd, _):
            self.files.sync_data(fd)

    def sync_shard(self, kind: Kind, shard: str) -> None:
        """The names in the shard, and the shard's own, survive a power loss."""
        sync_folder(self.files, self._folder(kind, shard))
        sync_folder(self.files, self.root / kind.value)

    def _listed_shard(self, kind: Kind, shard_name: str, shard: int) -> Iterator[Listed]:
        for name in self.files.names(shard):
            try:
                found = self.files.lstat(name, dir_fd=shard)
            except FileNotFoundError:
                continue  # evicted by another process meanwhile
            foreign = stat.S_ISDIR(found.st_mode) or name[:2] != shard_name
            yield Listed(
                shown(f"{kind}/{shard_name}/{name}"),
                None if foreign else Entry(kind, name),
                found.st_size if is_plain(found) else None,
            )

    def _folder(self, kind: Kind, shard: str) -> Path:
        return self.root / kind.value / shard

    @contextmanager
    def _shard(self, kind: Kind, shard: str) -> Iterator[int]:
        with opened_to_read(self.files, self._folder(kind, shard), FOLDER_FLAGS) as fd:
            yield fd


PAGE = 4096
"""Files are counted in pages: the unit in which file systems give room."""
MOST_NUMBER = 1 << 62
"""The largest number that is taken from a file. The index holds twice that: counted on from here,
nothing runs over.
"""
_NAME_BYTES = 256
"""What a name costs in its folder, generously: folders split when they are full."""
_MOST_COST = 1 << 44
"""More than a budget is, so that half a million files with holes of any size can be added up."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_BLOCK = re.compile(r"([0-9a-f]{64})\.(full|window|checkpoint)")
_MANIFEST = re.compile(r"([0-9a-f]{64})\.([0-9]{20})")


class Kind(StrEnum):
    """The folders that are divided into 256 shards by the first byte of their files' names."""

    BLOCKS = "blocks"
    AGENTS = "agents"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a shard."""

    kind: Kind
    name: str

    @property
    def shard(self) -> str:
        return self.name[:2]

    def __str__(self) -> str:
        return f"{self.kind}/{self.shard}/{self.name}"


def block_entry(key: BlockKey) -> Entry:
    return Entry(Kind.BLOCKS, f"{key.hash.hex()}.{key.part.value}")


def manifest_entry(agent: bytes, generation: int) -> Entry:
    return Entry(Kind.AGENTS, f"{agent.hex()}.{generation:020}")


def parse_block(name: str) -> BlockKey | None:
    """Whose block the file is, or None when it is not called like one."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    return BlockKey(BlockHash(bytes.fromhex(match[1])), Part(match[2]))


def parse_manifest(name: str) -> tuple[bytes, int] | None:
    """Agent and generation of a manifest, or None when the file is not called like one."""
    match = _MANIFEST.fullmatch(name)
    return None if match is None else (bytes.fromhex(match[1]), int(match[2]))


def agent_key(scope: Scope, agent_id: str) -> bytes:
    """What stands for an agent in names, 32 bytes."""
    name = agent_id.encode("utf-8", "surrogatepass")
    return digest("agent-v1", scope.namespace, scope.tenant, name)


def cost_of(n_bytes: int) -> int:
    """What a file of `n_bytes` takes of the budget: whole pages, and its name."""
    return min(-(-n_bytes // PAGE) * PAGE + _NAME_BYTES, _MOST_COST)


def shown(name: str) -> str:
    """A foreign name of any bytes as plain text, escaped where it is not; no two become one."""
    return quote(os.fsencode(name), safe=_PRINTABLE)


def unshown(text: str) -> str:
    """The name that `shown` made `text` of."""
    return os.fsdecode(unquote_to_bytes(text))


class DamagedError(Exception):
    """A file does not hold what its name promises; the message is the kind of damage."""

    @property
    def kind(self) -> str:
        return str(self)


class NewerFormatError(Exception):
    """A file was written by a later version; it is left alone."""


class MismatchError(Exception):
    """A file is sound but not what was asked for; the message names the field."""
