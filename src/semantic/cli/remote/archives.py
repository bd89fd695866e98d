"""`semantic agents export` and `import` with --server: an agent of a running server as one file.

Knows files and the terminal; not how archives are made or checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from semantic.cli.options import DEFAULT_KEY_VARIABLE, KeyVariable, StoreOptions
from semantic.cli.progress import download_bar
from semantic.cli.report import Json, show_bytes, show_name
from semantic.domain.errors import InvalidRequestError

if TYPE_CHECKING:
    from semantic.adapters.clients.agent_archives import Owner

_STDOUT = Path("-")
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """A running server, instead of the store on this machine's disk."""

    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            "--url",
            help="The address of a running server, whose agent is meant; FILE is one tar file. "
            "Default: the store.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="With --server: the model whose agent is meant; required if it has several.",
            show_default=False,
        ),
    ] = None
    key_variable: KeyVariable = DEFAULT_KEY_VARIABLE

    def address(self, store: StoreOptions, model_id: str | None = None) -> str | None:
        """The server; None for the store. Raises InvalidRequestError where both are meant."""
        if self.server is None and self.model is not None:
            raise InvalidRequestError("expected --model with --server only")
        if self.server is not None and (store != StoreOptions() or model_id is not None):
            raise InvalidRequestError(
                "expected either --server, or --store, --disk-gb and --model-id"
            )
        return self.server

    def owner(self, tenant: str | None) -> Owner:
        """Whose agent of the server is meant."""
        from semantic.adapters.clients.agent_archives import Owner

        return Owner(self.model, tenant)


def export_archive(
    url: str, key_variable: str, name: str, owner: Owner, file: Path
) -> tuple[str, Json]:
    """Write an agent of a server to a new file, or to stdout; returns it as text and as JSON."""
    from semantic.adapters.clients.agent_archives import exported

    with (
        _destination(file) as out,
        exported(url, key_variable, name, owner) as archive,
        download_bar(name, archive.n_bytes) as advance,
    ):
        for piece in archive.pieces:
            out.write(piece)
            advance(len(piece))
    text = f"{show_name(name)}: {show_bytes(archive.n_bytes)} in {file}"
    return text, {"name": name, "bytes": archive.n_bytes, "files": [str(file)]}


def import_archive(
    url: str, key_variable: str, file: Path, name: str | None, owner: Owner
) -> tuple[str, Json]:
    """Send a file of `export_archive` to a server; returns its agent there as text and as JSON."""
    from semantic.adapters.clients import agent_archives
    from semantic.adapters.exchange.transfer import open_file

    with open_file(file) as archive:
        n_bytes = os.fstat(archive.fileno()).st_size
        with download_bar(file.name, n_bytes) as advance:
            pieces = _pieces(archive, n_bytes, advance)
            own, tokens = agent_archives.import_archive(
                url, key_variable, (pieces, n_bytes), name, owner
            )
    text = f"{show_name(own)}: {tokens} tokens, {show_bytes(n_bytes)}"
    return text, {"name": own, "tokens": tokens, "bytes": n_bytes}


def is_stdout(file: Path) -> bool:
    """Whether an archive goes to stdout instead of a file."""
    return file == _STDOUT


@contextmanager
def _destination(file: Path) -> Iterator[BinaryIO]:
    from semantic.adapters.exchange.transfer import create_file

    if not is_stdout(file):
        with create_file(file) as out:
            yield out
        return
    if sys.stdout.isatty():
        raise InvalidRequestError("expected a file: an archive is not for a terminal")
    yield typer.get_binary_stream("stdout")


def _pieces(file: BinaryIO, n_bytes: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    """The first `n_bytes` of a file."""
    while n_bytes and (piece := file.read(min(n_bytes, _PIECE_BYTES))):
        n_bytes -= len(piece)
        yield piece
        advance(len(piece))
