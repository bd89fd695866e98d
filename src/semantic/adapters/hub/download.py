"""Downloads a model into the hub's cache so that an interruption loses nothing.

huggingface_hub restarts an interrupted file, and does not hash bytes that arrive by HTTP. This
module therefore fetches weights itself, and leaves all else to the library.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants as hub
from huggingface_hub import hf_hub_url, snapshot_download
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented
from huggingface_hub.utils.tqdm import disable_progress_bars

from semantic.adapters.hub.remote import RemoteFile, RemoteModel, hub_errors
from semantic.domain.errors import OperatorError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_AT_ONCE = 4
"""The number of files to fetch at once."""
_PIECE_BYTES = 1 << 20

OnBytes = Callable[[int], None]
"""Gets the number of new bytes from any thread, negative for discarded bytes."""


def missing_bytes(model: RemoteModel) -> int:
    """Return the number of bytes of `model` that are not on this disk yet."""
    blobs = _blobs(model)
    return sum(file.n_bytes - _kept(blobs, file) for file in model.files)


def drop_damaged(model: RemoteModel) -> list[str]:
    """Delete the damaged weights on this disk; return their paths."""
    blobs, damaged = _blobs(model), []
    for file in model.files:
        blob = blobs / file.name_in_cache
        if file.sha256 is not None and blob.exists() and _sha256(blob) != file.sha256:
            blob.unlink()
            damaged.append(file.path)
    return damaged


def require_space(model: RemoteModel) -> None:
    """Raise OperatorError unless the disk has room for the missing bytes."""
    folder, missing = Path(hub.HF_HUB_CACHE), missing_bytes(model)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise OperatorError(
            f"{model.hub_id!r} needs {missing} more bytes in {folder}, and its disk has {free}"
        )


def pull(model: RemoteModel, patterns: Sequence[str], on_bytes: OnBytes) -> Path:
    """Download the missing files of `model`; return the folder to load it from.

    Raises OperatorError, after which the next call resumes.
    """
    large = [file for file in model.files if file.sha256 is not None]
    small = [file for file in model.files if file.sha256 is None]
    with hub_errors(model.hub_id), disable_progress_bars():
        if small:
            _fetch_small(model, small, on_bytes)
        _Weights(model, on_bytes).fetch(large)
        return Path(snapshot_download(model.hub_id, allow_patterns=list(patterns)))


def _fetch_small(model: RemoteModel, files: Sequence[RemoteFile], on_bytes: OnBytes) -> None:
    # huggingface_hub does not verify hashes.
    blobs = _blobs(model)
    missing = [file for file in files if _kept(blobs, file) < file.n_bytes]
    paths = [file.path for file in files]
    folder = snapshot_download(model.hub_id, revision=model.commit, allow_patterns=paths)
    for file in files:
        path = Path(folder, file.path)
        if _git_hash(path) != file.blob_id:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise _damaged(model, file)
    on_bytes(sum(file.n_bytes for file in missing))


class _Weights:
    def __init__(self, model: RemoteModel, on_bytes: OnBytes) -> None:
        self._model = model
        self._on_bytes = on_bytes
        self._blobs = _blobs(model)
        self._stopped = threading.Event()

    def fetch(self, files: Sequence[RemoteFile]) -> None:
        """Fetch files, several at once. The first failure stops all downloads."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        missing = {file.sha256: file for file in files if _kept(self._blobs, file) < file.n_bytes}
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="download") as workers:
            running = [workers.submit(self._fetch, file) for file in missing.values()]
            try:
                for one in as_completed(running):
                    one.result()
            finally:
                self._stopped.set()  # running downloads end when their next bytes arrive
                workers.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, file: RemoteFile) -> None:
        blob, partial = self._blobs / file.name_in_cache, _partial(self._blobs, file)
        with _Arriving(partial, self._count) as arriving:
            _lock(arriving, file)
            if _size(blob) == file.n_bytes:  # another program finished it before we had the lock
                partial.unlink(missing_ok=True)
                return
            if arriving.tell() > file.n_bytes:
                arriving.truncate(0)
            http_get(
                hf_hub_url(self._model.hub_id, file.path, revision=self._model.commit),
                arriving,
                resume_size=arriving.tell(),
                # In a compressed response, offsets would not be those of the file.
                headers={**build_hf_headers(), "Accept-Encoding": "identity"},
                expected_size=file.n_bytes,
            )
            arriving.flush()
            if _sha256(partial) != file.sha256:
                partial.unlink()
                raise _damaged(self._model, file)
            partial.replace(blob)

    def _count(self, n_bytes: int) -> None:
        if self._stopped.is_set():
            raise OperatorError("the download was stopped")
        self._on_bytes(n_bytes)


class _Arriving(io.BufferedWriter):
    def __init__(self, path: Path, count: OnBytes) -> None:
        super().__init__(io.FileIO(path, "a"))
        self._count = count

    def write(self, data: Buffer, /) -> int:
        n_bytes = super().write(data)
        self._count(n_bytes)
        return n_bytes

    def truncate(self, size: int | None = None, /) -> int:
        self.flush()
        before = os.fstat(self.fileno()).st_size
        after = super().truncate(size)
        self.seek(0, os.SEEK_END)
        self._count(after - before)
        return after


def _lock(arriving: _Arriving, file: RemoteFile) -> None:
    """Lock the file. Raises OperatorError if another program holds the lock."""
    try:
        fcntl.flock(arriving.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OperatorError(f"another program is downloading {file.path}") from error


def _blobs(model: RemoteModel) -> Path:
    folder = repo_folder_name(repo_id=model.hub_id, repo_type="model")
    return Path(hub.HF_HUB_CACHE, folder, "blobs")


def _partial(blobs: Path, file: RemoteFile) -> Path:
    return blobs / f"{file.name_in_cache}.incomplete"


def _kept(blobs: Path, file: RemoteFile) -> int:
    # The full size if the file is complete
    if _size(blobs / file.name_in_cache) == file.n_bytes:
        return file.n_bytes
    partial = _size(_partial(blobs, file)) or 0
    return partial if partial <= file.n_bytes else 0


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_hash(path: Path) -> str:
    """Return the hash under which git stores a file's content."""
    found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            found.update(data)
    return found.hexdigest()


def _damaged(model: RemoteModel, file: RemoteFile) -> OperatorError:
    return OperatorError(f"{file.path} of {model.hub_id!r} arrived damaged: pull again")
