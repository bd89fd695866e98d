"""Fingerprint of a model: a hash of all its files and of how this machine computes.

Equal fingerprints give equal keys and values. Independent of the folder's path and of file times.
Knows files, not models.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from semantic.adapters.mlx import BLAS_STATUS, blas_kernel
from semantic.adapters.mlx.device import read_device
from semantic.adapters.mlx.model.digest_cache import DigestCache, FileState
from semantic.domain.block_hash import ANY_CHIP
from semantic.domain.digest import digest

_WHOLE = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"})
"""Configuration, tokenizer and templates."""
_WEIGHTS = frozenset({".safetensors"})
_MORE_TEMPLATES = "additional_chat_templates/*.jinja"

_KIND = "sha256:"
_CHUNK = 16 << 20
_WORTH_CACHING = 64 << 20
_THREADS = max(4, min(16, os.cpu_count() or 1))
"""SHA-256 releases the interpreter lock, so several threads read and hash in parallel."""


def fingerprint(folder: Path, cache: DigestCache | None = None, *, any_chip: bool = False) -> str:
    """The model id of the model in `folder`. Raises OSError if a file cannot be read.

    Digests of large weight files are cached in `cache`, by default the user's own. With `any_chip`
    machines that differ in chip or BLAS kernel alone give the model one id, which says so: their
    keys and values differ in the last bits.
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
    """The model id of the model with the fingerprint `model` under an adapter in `files`. Raises
    OSError if one cannot be read."""
    cache = DigestCache()
    digests = [_digest_file(path, cache) for path in files]
    cache.save()
    kind = model.partition(_KIND)[0] + _KIND
    return f"{kind}{digest('adapted-v1', model.encode(), *digests).hex()}"


def is_fingerprint(model_id: str) -> bool:
    """Whether a model id is that of files, not a name that was made up."""
    return model_id.removeprefix(ANY_CHIP).startswith(_KIND)


def file_states(folder: Path) -> dict[str, FileState]:
    """The state of each file that the fingerprint covers, by name.

    A model whose states are the same before and after it was loaded and hashed is the one that the
    fingerprint names. Raises OSError.
    """
    return {path.relative_to(folder).as_posix(): FileState.of(path) for path in _files_of(folder)}


def numerics(*, any_chip: bool = False) -> str:
    """What determines rounding here: libraries, device, chip, architecture, weight type, BLAS and
    its kernel; with `any_chip` without chip and kernel."""
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


def _files_of(folder: Path) -> Iterator[Path]:
    """The files that determine what the model computes and how text is tokenized."""
    for path in (*folder.iterdir(), *folder.glob(_MORE_TEMPLATES)):
        if path.suffix in _WHOLE | _WEIGHTS and path.is_file():
            yield path


def _digest_file(path: Path, cache: DigestCache) -> bytes:
    """Digest of the file's size and of each 16 MiB of it."""
    before = FileState.of(path)
    cacheable = path.suffix in _WEIGHTS and before.size >= _WORTH_CACHING
    known = cache.get(before) if cacheable else None
    if known is not None:
        return known
    found = _hash(path, before.size)
    # The digest of a file modified during the read, or just before, is not cached.
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
