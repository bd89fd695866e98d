"""Agents as archive files: written beside their place and renamed when they are whole.

Knows bytes and files; not what an archive contains.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from semantic.domain.errors import InvalidRequestError, OperatorError

_PIECE_BYTES: Final = 1 << 20


async def write_archive(path: Path, pieces: AsyncIterable[bytes]) -> None:
    """Write `pieces` to `path`, readable by its owner alone; what fails leaves what was there.

    Raises OperatorError, and what `pieces` raises.
    """
    with _named(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        unfinished = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                async for piece in pieces:
                    await asyncio.to_thread(file.write, piece)
                await asyncio.to_thread(os.fsync, file.fileno())
            unfinished.replace(path)
        finally:
            with suppress(OSError):  # it has its name by now, unless something failed
                unfinished.unlink()


async def read_archive(path: Path) -> AsyncGenerator[bytes, None]:
    """The bytes of a file, at most a MiB at once. Raises InvalidRequestError."""
    try:
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(partial(file.read, _PIECE_BYTES)):
                yield piece
    except OSError as error:
        raise InvalidRequestError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {error.strerror or error}") from error
