"""Agents as archives: an export's document and container in one tar file.

The document comes first, so that the reader can check it before it accepts a body.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from semantic.adapters.exchange.document import (
    AgentDocument,
    BodyEntry,
    checksum,
    container_header,
    read_document,
    tokens_in_block,
    write_document,
)
from semantic.adapters.exchange.transfer import (
    document_of,
    manifest_of,
    put_agent,
    require_intact,
    stored_bodies,
)
from semantic.domain.block_hash import Part
from semantic.domain.errors import CapacityError, InvalidRequestError, StoreError
from semantic.domain.stored import BlockHeader, BlockLayout, Manifest
from semantic.ports.agents import Check
from semantic.ports.store import StorePort

DOCUMENT, CONTAINER = "agent.json", "agent.safetensors"

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_MOST_END_BYTES = 1 << 20
"""The maximum number of zero bytes after the last member."""
_MAX_DOCUMENT_BYTES = 16 << 20
"""The maximum size of a document in bytes, enough for 1.5 million tokens. Parsing a document blocks
all other Python threads."""
_PIECE_BYTES = 1 << 20


class AgentArchives:
    """Implements `ExchangePort` for the agents of one model."""

    def __init__(
        self,
        store: StorePort,
        durable: StorePort,
        namespace: bytes,
        layout: BlockLayout,
        folder: Path | None,
        *,
        model: str,
        model_name: str,
    ) -> None:
        """Imports go to `durable`, the most durable tier of `store`. Received bytes go into an
        unnamed file in `folder`; None is the system's temporary folder."""
        self._store = store
        self._durable = durable
        self._namespace = namespace
        self._layout = layout
        self._folder = folder
        self._model = model
        self._model_name = model_name

    def export(self, manifest: Manifest, check: Check) -> Outgoing:
        bodies = []
        for header, entry in stored_bodies(self._store, manifest):
            check()
            body = self._store.read(header)
            if body is not None:  # None if the store has just evicted it
                found = replace(entry, n_bytes=len(body), checksum=checksum(body))
                bodies.append((header, found))
        return Outgoing(self._store, replace(manifest, model=self._model_name), bodies)

    def receive(self, accept: Callable[[str], None]) -> Incoming:
        def check(document: AgentDocument) -> None:
            self._require_model(document)
            self._require_room(document)
            accept(document.agent_id)

        return Incoming(self._durable, check, self._folder, self._model)

    def _require_model(self, document: AgentDocument) -> None:
        if document.layout == self._layout.other_name:
            raise InvalidRequestError("this agent's cache has other bits: see --kv-bits")
        if document.namespace != self._namespace:
            raise InvalidRequestError(
                f"this agent belongs to another model ({document.model!r:.200}, id "
                f"{document.namespace.hex()[:12]}): expected one of the served model, id "
                f"{self._namespace.hex()[:12]}"
            )
        n_tokens = len(document.token_ids)
        for body in document.bodies:
            fits = body.part is Part.CHECKPOINT or body.n_bytes == self._layout.body_bytes(
                body.part, tokens_in_block(body.block, n_tokens)
            )
            if document.layout != self._layout.name or not fits:
                raise InvalidRequestError(f"body {body.name} does not have the layout of the model")

    def _require_room(self, document: AgentDocument) -> None:
        room = self._durable.stats()[0].max_bytes
        if document.n_bytes > room:
            raise InvalidRequestError(
                f"the agent's blocks have {document.n_bytes} bytes: expected at most {room}, the "
                "quota of the store"
            )


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Implements `OutgoingArchive`."""

    store: StorePort
    manifest: Manifest
    bodies: Sequence[tuple[BlockHeader, BodyEntry]]

    @property
    def n_bytes(self) -> int:
        sizes = len(self._document()), self._container_bytes()
        return sum(_BLOCK + size + _padding(size) for size in sizes) + len(_END)

    def pieces(self) -> Iterator[bytes]:
        document, n_bytes = self._document(), self._container_bytes()
        yield from _divided(_header(DOCUMENT, len(document)) + document)
        yield bytes(_padding(len(document))) + _header(CONTAINER, n_bytes)
        yield from _divided(container_header([entry for _, entry in self.bodies]))
        for header, entry in self.bodies:
            body = self.store.read(header)
            if body is None or checksum(body) != entry.checksum:
                raise StoreError(f"cannot send body {entry.name}: it was evicted or has changed")
            yield from _divided(body)
        yield bytes(_padding(n_bytes)) + _END

    def _document(self) -> bytes:
        return write_document(document_of(self.manifest, self.bodies))

    def _container_bytes(self) -> int:
        entries = [entry for _, entry in self.bodies]
        return len(container_header(entries)) + sum(entry.n_bytes for entry in entries)


class Incoming:
    """Implements `IncomingArchive` with the container in a file."""

    def __init__(
        self,
        store: StorePort,
        accept: Callable[[AgentDocument], None],
        folder: Path | None,
        model: str,
    ) -> None:
        self._store = store
        self._accept = accept
        self._model = model
        self._folder = folder
        self._document: AgentDocument | None = None
        self._file: BinaryIO | None = None
        self._is_whole = False
        self._unread = bytearray()
        self._parts = self._read()
        self._wanted = next(self._parts)

    def write(self, data: bytes) -> None:
        self._unread += data
        while len(self._unread) >= self._wanted:
            part = bytes(self._unread[: self._wanted])
            del self._unread[: self._wanted]
            self._wanted = self._parts.send(part)

    def put(self, tenant: bytes, name: str | None, check: Check) -> Manifest:
        if self._document is None or self._file is None or not self._is_whole:
            raise InvalidRequestError(f"the archive ends inside {CONTAINER}")
        if self._unread:
            raise InvalidRequestError(f"the archive's size must be a multiple of {_BLOCK} bytes")
        document = self._document
        manifest = replace(manifest_of(document, tenant, name), model=self._model)
        require_intact(self._file, document)
        self._accept(document)
        put_agent(
            self._store, manifest, document, self._file, check, lambda: self._accept(document)
        )
        return manifest

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> Generator[int, bytes, None]:
        # Each `yield` asks for a number of bytes, and receives them.
        n_bytes = _size(DOCUMENT, (yield _BLOCK))
        if n_bytes > _MAX_DOCUMENT_BYTES:
            raise InvalidRequestError(f"{DOCUMENT} has more than {_MAX_DOCUMENT_BYTES} bytes")
        try:
            document = read_document((yield n_bytes))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{DOCUMENT}: {error}") from error
        self._accept(document)
        self._document = document
        yield _padding(n_bytes)
        n_bytes = _size(CONTAINER, (yield _BLOCK))
        expected = len(container_header(document.bodies)) + document.n_bytes
        if n_bytes != expected:
            raise InvalidRequestError(f"{CONTAINER}: expected {expected} bytes, got {n_bytes}")
        with _out_of_room():
            self._file = _unnamed_file(self._folder, n_bytes)
        for at in range(0, n_bytes, _PIECE_BYTES):
            piece = yield min(_PIECE_BYTES, n_bytes - at)
            with _out_of_room():
                self._file.write(piece)
        with _out_of_room():
            self._file.flush()
        yield _padding(n_bytes)
        self._is_whole = True
        for _ in range(_MOST_END_BYTES // _BLOCK):
            if any((yield _BLOCK)):
                break
        raise InvalidRequestError(f"expected the end of the archive after {CONTAINER}")


def _header(name: str, n_bytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = n_bytes
    member.mode = 0o600
    return member.tobuf(tarfile.GNU_FORMAT)


def _size(name: str, header: bytes) -> int:
    """Return the bytes of the member `name`. Raises InvalidRequestError for another member."""
    try:
        member = tarfile.TarInfo.frombuf(header, "ascii", "surrogateescape")
    except tarfile.HeaderError as error:
        raise InvalidRequestError(f"cannot read the tar header of {name}: {error}") from error
    if member.name != name or member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE}:
        raise InvalidRequestError(
            f"the archive must hold the files {DOCUMENT} and {CONTAINER}, in this order"
        )
    if member.size < 0:
        raise InvalidRequestError(f"the size of {name} must be 0 or more, got {member.size}")
    return member.size


def _padding(n_bytes: int) -> int:
    return -n_bytes % _BLOCK


def _divided(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), _PIECE_BYTES):
        yield data[at : at + _PIECE_BYTES]


def _unnamed_file(folder: Path | None, n_bytes: int) -> BinaryIO:
    """Open a file that vanishes with this process. Raises CapacityError if the disk is full."""
    if shutil.disk_usage(folder or tempfile.gettempdir()).free < n_bytes:
        raise CapacityError(f"the disk has no room for {n_bytes} more bytes")
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder))


@contextmanager
def _out_of_room() -> Iterator[None]:
    """Turn an OSError in the `with` block into CapacityError."""
    try:
        yield
    except OSError as error:
        raise CapacityError(f"cannot hold the archive: {error.strerror}") from error
