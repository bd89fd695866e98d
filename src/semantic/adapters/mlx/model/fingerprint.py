"""Fingerprint of a model: a hash of all its files and of how this machine computes.

Models with equal fingerprints compute equal keys and values.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

from semantic.adapters.mlx import BLAS_STATUS, blas_kernel
from semantic.adapters.mlx.device import read_device
from semantic.domain.block_hash import ANY_CHIP
from semantic.domain.identity import digest

_FILE = "weights.json"
_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 1000
_DIGEST_BYTES = 32
_CLOCK_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's metadata, which changes with its content. No program can set `ctime_ns` back."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the state of the file at `path`, following symlinks."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """True if every later change of the file changes its state, even with a coarse clock."""
        return time.time_ns() - self.ctime_ns > _CLOCK_NS

    @property
    def key(self) -> str:
        return "-".join(map(str, astuple(self)))


def cache_folder() -> Path:
    """Return this user's folder for the engine's caches."""
    own = os.environ.get("SEMANTIC_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared).expanduser() / "semantic"
    usual = Path("Library", "Caches") if sys.platform == "darwin" else Path(".cache")
    return Path.home() / usual / "semantic"


class DigestCache:
    """Maps files' states to digests. An unusable cache file counts as empty."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._entries: dict[str, str] = {}
        self._loaded = False
        self._changed = False

    def get(self, state: FileState) -> bytes | None:
        """Return the 32-byte digest of the file with this state; None if unknown."""
        self._load()
        found = self._entries.get(state.key)
        return None if found is None else bytes.fromhex(found)

    def put(self, state: FileState, digest: bytes) -> None:
        """Add `digest` in memory only; `save` writes it to disk."""
        self._load()
        self._entries[state.key] = digest.hex()
        self._changed = True

    def save(self) -> None:
        """Write new digests to disk, readable only by the owner."""
        if not self._changed:
            return
        newest = dict(list(self._entries.items())[-_MAX_ENTRIES:])
        # A home folder that is missing or not writable only costs time.
        with contextlib.suppress(OSError, RuntimeError):
            _write(self._path(), json.dumps(newest).encode())
            self._changed = False

    def _path(self) -> Path:
        return (cache_folder() if self._folder is None else self._folder) / _FILE

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._entries = _parse(_read(self._path()))


def _read(path: Path) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or others_write:
            raise ValueError(f"{path} must be a plain file of this user's own")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path} is too large")
    return data


def _parse(data: bytes) -> dict[str, str]:
    entries: object = json.loads(data)
    if not isinstance(entries, dict):
        raise ValueError("no entries")  # noqa: TRY004  comes from a file, not from a caller
    return {
        key: value for key, value in entries.items() if isinstance(value, str) and _is_digest(value)
    }


def _is_digest(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == _DIGEST_BYTES
    except ValueError:
        return False


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:  # from mkstemp: only its owner can read it
            file.write(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


_WHOLE = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"})
"""Suffixes of files that are hashed whole."""
_WEIGHTS, _INDEX, _ALONE = ".safetensors", "model.safetensors.index.json", "model.safetensors"
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"

_KIND = "sha256:"
_CHUNK = 16 << 20
_WORTH_CACHING = 64 << 20
_THREADS = max(4, min(16, os.cpu_count() or 1))
"""The number of threads that hash in parallel. SHA-256 releases the interpreter lock."""


def fingerprint(folder: Path, cache: DigestCache | None = None, *, any_chip: bool = False) -> str:
    """Return the id of the model in `folder`. Raises OSError if a file is unreadable.

    If `any_chip`, the id does not depend on the chip, although chips differ in the last bits.
    """
    cache = DigestCache() if cache is None else cache
    fields = [numerics(any_chip=any_chip).encode()]
    for path in sorted(_files_of(folder)):
        name = path.relative_to(folder).as_posix().encode()
        fields += [name, _digest_file(path, cache)]
    cache.save()
    kind = f"{ANY_CHIP}{_KIND}" if any_chip else _KIND
    return f"{kind}{digest('model-v1', *fields).hex()}"


def adapted_fingerprint(model: str, files: Iterable[Path]) -> str:
    """Return the id of the model with fingerprint `model` and the adapter in `files`. Raises
    OSError if a file is unreadable."""
    cache = DigestCache()
    digests = [_digest_file(path, cache) for path in files]
    cache.save()
    kind = model.partition(_KIND)[0] + _KIND
    return f"{kind}{digest('adapted-v1', model.encode(), *digests).hex()}"


def is_fingerprint(model_id: str) -> bool:
    """Return whether a model id is a fingerprint of files."""
    return model_id.removeprefix(ANY_CHIP).startswith(_KIND)


def file_states(folder: Path) -> dict[str, FileState]:
    """Return the states of the files in the fingerprint, by file name. May raise OSError."""
    return {path.relative_to(folder).as_posix(): FileState.of(path) for path in _files_of(folder)}


def numerics(*, any_chip: bool = False) -> str:
    """Return all that determines rounding, such as libraries, device and weight type. If
    `any_chip`, leave out the chip."""
    device = read_device()
    kind = device.kind
    parts = {
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "device": kind.lower(),
        "machine": platform.machine(),
        "weights": "fp32" if kind == "CPU" else "as stored",
        "blas": BLAS_STATUS if kind == "CPU" else "none",
    }
    if not any_chip:
        parts["chip"] = device.chip
        parts["kernel"] = blas_kernel() if kind == "CPU" else "none"
    return " ".join(f"{name}={value}" for name, value in parts.items())


def weight_files(folder: Path) -> list[Path]:
    """Return the model's weight files, as its index lists them if it has one. Raises OSError if the
    index is malformed or files are missing."""
    index, alone = folder / _INDEX, folder / _ALONE
    named = [folder / name for name in _names_in(index)] if index.is_file() else []
    missing = [path.name for path in named if not path.is_file()]
    if named and len(missing) < len(named):
        if missing:
            raise OSError(f"{missing[0]} is missing, which {index} names; fetch the model again")
        return named
    return [alone] if alone.is_file() else sorted(folder.glob(f"model*{_WEIGHTS}"))


def _names_in(index: Path) -> list[str]:
    try:
        names = sorted({*json.loads(index.read_bytes())["weight_map"].values()})
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise OSError(f"{index} is not an index of weights; fetch the model again") from error
    if outside:
        raise OSError(f"{index} names {outside[0]!r}, which is not in its folder")
    return names


@contextlib.contextmanager
def only_weights(folder: Path) -> Iterator[Path]:
    """Yield a folder with exactly the model's weights as `model*.safetensors`. Raises OSError."""
    used = weight_files(folder)
    if used == sorted(folder.glob(f"model*{_WEIGHTS}")):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="semantic-") as links:
        for path in folder.iterdir():
            if path.suffix != _WEIGHTS:
                Path(links, path.name).symlink_to(path.absolute())
        for number, path in enumerate(used):
            Path(links, f"model-{number}{_WEIGHTS}").symlink_to(path.absolute())
        yield Path(links)


def _files_of(folder: Path) -> Iterator[Path]:
    """Yield the files that determine what the model computes and how it tokenizes text."""
    yield from weight_files(folder)
    for path in (*folder.iterdir(), *folder.glob(_MORE_TEMPLATES)):
        if path.suffix in _WHOLE and path.is_file():
            yield path


def _digest_file(path: Path, cache: DigestCache) -> bytes:
    """Return a digest of the file's size and of its 16 MiB pieces."""
    before = FileState.of(path)
    cacheable = path.suffix in _WEIGHTS and before.size >= _WORTH_CACHING
    known = cache.get(before) if cacheable else None
    if known is not None:
        return known
    found = _hash(path, before.size)
    # Do not cache the digest of a file that changed while being read or just before.
    if cacheable and before.settled and FileState.of(path) == before:
        cache.put(before, found)
    return found


def _hash(path: Path, size: int) -> bytes:
    starts = range(0, size, _CHUNK)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="hash") as threads:
        chunks = list(threads.map(lambda start: _hash_chunk(path, start), starts))
    return digest("file-v1", size.to_bytes(8, "little"), *chunks)


def _hash_chunk(path: Path, start: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        hashed = hashlib.sha256()
        left = _CHUNK
        while left and (data := file.read(min(left, 1 << 20))):
            hashed.update(data)
            left -= len(data)
    return hashed.digest()
