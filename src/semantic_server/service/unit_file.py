"""The file of a service: written atomically; another's file is left alone."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from semantic.domain.errors import InvalidRequestError, OperatorError

MARK: Final = "Written by `semantic service install`; `semantic service uninstall` removes it."
"""In every file that this package writes; a file without it is another's."""


def read(path: Path) -> str | None:
    """The text of our file, None if there is none. Raises OperatorError for another's file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"cannot read {path}: {_reason(error)}") from error
    if MARK not in text:
        raise OperatorError(
            f"{path} was not written by `semantic service install`: move it away first"
        )
    return text


def write(path: Path, text: str) -> bool:
    """Whether the text at `path` changed to `text`: the file has the old one or the new one.

    Raises OperatorError, also for another's file.
    """
    if read(path) == text:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except OSError:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {_reason(error)}") from error
    return True


def remove(path: Path) -> bool:
    """Whether there was a file of ours. Raises OperatorError."""
    if read(path) is None:
        return False
    try:
        path.unlink()
    except OSError as error:
        raise OperatorError(f"cannot remove {path}: {_reason(error)}") from error
    return True


def require_printable(command: tuple[str, ...]) -> None:
    """Raises InvalidRequestError for a word that a line of such a file cannot hold."""
    for word in command:
        if not word.isprintable():
            raise InvalidRequestError(f"expected no control characters, got {word!r:.80}")


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is no UTF-8 text"
