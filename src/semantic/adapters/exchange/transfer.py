"""Exports an agent with its blocks to two files, and imports it into another store.

FILE.json holds the agent, FILE.safetensors the bodies. Only the imported agent may use the bodies,
because an import cannot check their numbers.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from semantic.adapters.exchange.document import (
    AgentDocument,
    BodyEntry,
    checksum,
    container_header,
    read_document,
    write_document,
)
from semantic.domain.block_hash import BlockKey, BlockLink, Part, Scope, tenant_tag
from semantic.domain.errors import CapacityError, InvalidRequestError, SemanticError, StoreError
from semantic.domain.stored import BlockHeader, Manifest, OnProgress, StoredBlock, no_progress
from semantic.domain.value_objects import BLOCK_TOKENS
from semantic.ports.store import StorePort

_SUFFIXES = (".safetensors", ".json")
_OWNER_ONLY = 0o600
_MAX_DOCUMENT_BYTES = 32 << 20
"""The maximum size of a document in bytes, for three million tokens. A parsed document takes
several times as much memory."""
_PIECE_BYTES = 1 << 20
_SALT_BYTES = 32
_DESCRIPTORS = Path("/proc/self/fd")
_SYNC_BYTES = 64 << 20
"""Bytes of bodies between two flushes. With more, other writers would wait longer."""
_NO_CHECKSUM = "0" * 32
"""Placeholder for checksums of bodies not read yet."""


@dataclass(frozen=True, slots=True)
class AgentFiles:
    """The paths of an exported agent's two files."""

    bodies: Path
    document: Path

    @classmethod
    def of(cls, given: Path) -> AgentFiles:
        """Return the two paths for `given`, with or without a suffix."""
        stem = given.with_suffix("") if given.suffix in _SUFFIXES else given
        if stem.name in ("", ".."):
            raise InvalidRequestError(f"expected the name of a file, got {str(given)!r}")
        bodies, document = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
        return cls(bodies, document)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export. `n_blocks` includes the agent's blocks that the store lacks."""

    files: AgentFiles
    n_bodies: int
    n_bytes: int
    n_blocks: int
    missing_blocks: int
    """The number of blocks that the model recomputes after an import."""


def export_agent(
    store: StorePort, manifest: Manifest, given: Path, on_progress: OnProgress = no_progress
) -> Exported:
    """Write an agent and its stored bodies to two new files. `on_progress` counts bytes. On
    failure, raises InvalidRequestError and leaves no new file."""
    files = AgentFiles.of(given)
    if os.path.lexists(files.document):
        raise _taken(files.document)
    planned = stored_bodies(store, manifest)
    progress = _Progress(on_progress, sum(entry.n_bytes for _, entry in planned))
    with ExitStack() as undo:
        with create_file(files.bodies) as file:
            file.write(container_header([entry for _, entry in planned]))
            bodies = []
            for header, entry in planned:
                body = _read_body(store, header, entry)
                file.write(body)
                bodies.append((header, replace(entry, checksum=checksum(body))))
                progress.add(entry.n_bytes)
            document = document_of(manifest, bodies)
            # Nested: if one of the two files fails, the other is removed too.
            with create_file(files.document) as described:
                described.write(write_document(document))
            undo.callback(files.document.unlink)
        undo.pop_all()
    n_blocks = -(-len(manifest.token_ids) // BLOCK_TOKENS)
    present = {body.block for body in document.bodies}
    return Exported(files, len(bodies), document.n_bytes, n_blocks, n_blocks - len(present))


def stored_bodies(store: StorePort, manifest: Manifest) -> list[tuple[BlockHeader, BodyEntry]]:
    """Return the header and the entry of each stored body, in container order."""
    headers = dict(_headers(store, list(manifest.scope.chain(manifest.token_ids))))
    found = store.find([header.key for header in headers.values()])
    return [
        (header, BodyEntry(block, part, found[header.key].n_bytes, _NO_CHECKSUM))
        for (block, part), header in headers.items()
        if header.key in found
    ]


def document_of(
    manifest: Manifest, bodies: Sequence[tuple[BlockHeader, BodyEntry]]
) -> AgentDocument:
    return AgentDocument(
        namespace=manifest.scope.namespace,
        layout=bodies[0][0].layout if bodies else "",
        agent_id=manifest.agent_id,
        model=manifest.model,
        note=manifest.note,
        prompt_tokens=manifest.prompt_tokens,
        token_ids=manifest.token_ids,
        bodies=tuple(entry for _, entry in bodies),
    )


def _headers(
    store: StorePort, links: Sequence[BlockLink]
) -> Iterator[tuple[tuple[int, Part], BlockHeader]]:
    for block, link in enumerate(links):
        for part in Part:
            for header in store.nearest(link.parent, part, link.tokens):
                if header.link == link:
                    yield (block, part), header


def _read_body(store: StorePort, header: BlockHeader, entry: BodyEntry) -> bytes:
    body = store.read(header)
    if body is None or len(body) != entry.n_bytes:
        raise InvalidRequestError(
            f"cannot read body {entry.name}: it was evicted or is damaged; "
            "export again to get the remaining blocks"
        )
    return body


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import: the saved agent, and the number and bytes of its bodies."""

    manifest: Manifest
    n_bodies: int
    n_bytes: int


def import_agent(
    store: StorePort,
    given: Path,
    *,
    tenant: str = "",
    name: str | None = None,
    on_progress: OnProgress = no_progress,
) -> Imported:
    """Put an exported agent into `store` as `name`. None means the agent's exported name.

    Raises InvalidRequestError for a bad file or name. Raises CapacityError if the blocks exceed the
    quota, and StoreError if the store cannot save the agent.
    """
    files = AgentFiles.of(given)
    document = _read_document(files.document)
    manifest = manifest_of(document, tenant_tag(store.secret, tenant), name)
    manifest = replace(manifest, model=_model_here(store, document))
    _require_free_name(store, manifest)
    _require_room(store, document)
    progress = _Progress(on_progress, 2 * document.n_bytes)
    with open_file(files.bodies) as file:
        try:
            require_intact(file, document, progress.add)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{files.bodies}: {error}") from error
        sizes = (entry.n_bytes for entry in document.bodies)
        put_agent(store, manifest, document, file, lambda: progress.add(next(sizes)))
    return Imported(manifest, len(document.bodies), document.n_bytes)


class _Progress:
    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self._done = 0

    def add(self, n_bytes: int) -> None:
        self._done += n_bytes
        self._on_progress(self._done, self._total)


def manifest_of(document: AgentDocument, tenant: bytes, name: str | None) -> Manifest:
    """Return the agent in `document` as a manifest of the tenant with the tag `tenant`. A new salt
    keeps other agents from its blocks."""
    scope = Scope(document.namespace, tenant, secrets.token_bytes(_SALT_BYTES))
    return Manifest(
        scope,
        document.agent_id if name is None else name,
        document.token_ids,
        prompt_tokens=document.prompt_tokens,
        note=document.note,
        model=document.model,
        saved_at=time.time(),
    )


def put_agent(
    store: StorePort,
    manifest: Manifest,
    document: AgentDocument,
    file: BinaryIO,
    check: Callable[[], None] = lambda: None,
    check_save: Callable[[], None] = lambda: None,
) -> None:
    """Put the bodies in `file` into `store`, then save the agent. On failure, drop the bodies.

    Calls `check` before each put and `check_save` before the save; both may raise. Raises
    InvalidRequestError, CapacityError or StoreError.
    """
    links = list(manifest.scope.chain(manifest.token_ids))
    keys: list[BlockKey] = []
    with ExitStack() as undo:
        undo.callback(_drop, store, keys)
        unsynced = 0
        # Read and verify again: the import holds no bodies in memory, and a file may change
        # meanwhile.
        for entry, body in _bodies(file, document):
            check()
            header = BlockHeader(links[entry.block], entry.part, document.layout)
            keys.append(header.key)
            if not store.put(StoredBlock(header, body)):
                raise CapacityError(
                    f"cannot store block {entry.block} of {len(links)}: the store's quota or its "
                    "disk is full; raise --disk-gb or unpin agents"
                )
            unsynced += len(body)
            if unsynced >= _SYNC_BYTES:
                store.flush()
                unsynced = 0
        check_save()
        if not store.agents.save(manifest):
            raise StoreError(f"cannot save agent {manifest.agent_id!r}: the store refused it")
        undo.pop_all()


def _drop(store: StorePort, keys: Sequence[BlockKey]) -> None:
    for key in keys:  # one by one, because other writers wait while a call runs
        store.drop([key])


def _model_here(store: StorePort, document: AgentDocument) -> str:
    for scope in store.agents.scopes():
        if scope.namespace == document.namespace:
            for manifest in store.agents.page(scope, 1):
                return manifest.model
    return document.model


def _read_document(path: Path) -> AgentDocument:
    with open_file(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        if n_bytes > _MAX_DOCUMENT_BYTES:
            raise InvalidRequestError(f"{path} is larger than {_MAX_DOCUMENT_BYTES} bytes")
        data = file.read(n_bytes)
    try:
        return read_document(data)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error


def _require_free_name(store: StorePort, manifest: Manifest) -> None:
    if not manifest.agent_id:
        raise InvalidRequestError("an agent's name must not be empty")
    if store.agents.manifest(manifest.scope, manifest.agent_id) is not None:
        raise InvalidRequestError(
            f"an agent {manifest.agent_id!r} of this model exists already; use --as to rename it"
        )


def _require_room(store: StorePort, document: AgentDocument) -> None:
    needed, room = document.n_bytes, max(tier.max_bytes for tier in store.stats())
    if needed > room:
        raise CapacityError(
            f"the agent's {needed} bytes exceed the store's quota of {room} bytes; raise --disk-gb"
        )


def require_intact(
    file: BinaryIO, document: AgentDocument, on_bytes: Callable[[int], None] = lambda _: None
) -> None:
    """Check the whole container. Calls `on_bytes` after each sound body. Raises
    InvalidRequestError."""
    _to_first_body(file, document)
    for entry in document.bodies:
        found = xxhash.xxh3_128()
        for at in range(0, entry.n_bytes, _PIECE_BYTES):
            found.update(file.read(min(_PIECE_BYTES, entry.n_bytes - at)))
        _require_checksum(entry, found.hexdigest())
        on_bytes(entry.n_bytes)


def _bodies(file: BinaryIO, document: AgentDocument) -> Iterator[tuple[BodyEntry, bytes]]:
    """Yield each entry and its body. Raises InvalidRequestError at the first wrong checksum."""
    _to_first_body(file, document)
    for entry in document.bodies:
        body = file.read(entry.n_bytes)
        _require_checksum(entry, checksum(body))
        yield entry, body


def _require_checksum(entry: BodyEntry, found: str) -> None:
    if found != entry.checksum:
        raise InvalidRequestError(f"body {entry.name} is damaged: its checksum does not match")


def _to_first_body(file: BinaryIO, document: AgentDocument) -> None:
    """Seek to the first body. Raises InvalidRequestError if the file's size or header is wrong."""
    header = container_header(document.bodies)
    expected = len(header) + document.n_bytes
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise InvalidRequestError(f"expected {expected} bytes, got {size}")
    file.seek(0)
    if file.read(len(header)) != header:
        raise InvalidRequestError("its header differs from the JSON file")


@contextmanager
def create_file(path: Path) -> Iterator[BinaryIO]:
    """Create a file that only its owner can read, and delete it if the `with` block raises.

    Raises InvalidRequestError if the path exists or is not writable.
    """
    if os.path.lexists(path):
        raise _taken(path)
    with ExitStack() as undo:
        try:
            descriptor = _open_unnamed(path.parent)
            is_named = descriptor is None
            if descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                descriptor = os.open(path, flags, _OWNER_ONLY)
                undo.callback(path.unlink, missing_ok=True)
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if not is_named:
                    _link(descriptor, path)
        except FileExistsError as error:
            raise _taken(path) from error
        except SemanticError:  # raised in the `with` block, not by the file
            raise
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"cannot write {path}: {_reason(error)}") from error
        undo.pop_all()


def _open_unnamed(folder: Path) -> int | None:
    kind: int | None = getattr(os, "O_TMPFILE", None)
    if kind is None or not _DESCRIPTORS.is_dir():
        return None
    with suppress(OSError):
        return os.open(folder, kind | os.O_WRONLY | os.O_CLOEXEC, _OWNER_ONLY)
    return None


def _link(descriptor: int, path: Path) -> None:
    # `link` follows a symbolic link at its source only if given a folder's descriptor, which it
    # then ignores because the path is absolute.
    os.link(_DESCRIPTORS / str(descriptor), path, src_dir_fd=descriptor)


def _taken(path: Path) -> InvalidRequestError:
    return InvalidRequestError(f"{path} exists already; choose another name")


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises InvalidRequestError unless it is a regular file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if path.is_symlink():
        raise InvalidRequestError(f"{path} is a link; name the file itself")
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot read {path}: {_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequestError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise InvalidRequestError(f"cannot read {path}: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
