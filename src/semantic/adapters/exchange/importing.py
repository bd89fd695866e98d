"""Reads an exported agent into a store.

All of both files is checked before anything is put. Hashes are made anew from the tokens, under
the tenant it is imported for: what the files call a block counts for nothing. What the numbers
in the bodies are cannot be checked: whoever made the files is trusted with that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from semantic.adapters.exchange.agent_files import AgentFiles, opening
from semantic.adapters.exchange.container import container_header
from semantic.adapters.exchange.document import (
    AgentDocument,
    BodyEntry,
    checksum,
    read_document,
)
from semantic.domain.block_hash import Scope, tenant_tag
from semantic.domain.errors import CapacityError, InvalidRequestError, StoreError
from semantic.domain.stored import BlockHeader, Manifest, StoredBlock
from semantic.ports.store import CacheStorePort

_LARGEST_DOCUMENT = 256 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """What was read: the agent as it was saved, and its bodies."""

    manifest: Manifest
    n_bodies: int
    n_bytes: int


def import_agent(
    store: CacheStorePort, given: Path, *, tenant: str = "", name: str | None = None
) -> Imported:
    """Put an exported agent into `store`, under `name` or the one it had.

    Raises InvalidRequestError when a file is missing, damaged, of a newer format or not what it
    should be, or when the name is taken, before anything is put; CapacityError when there is no
    room for a block and StoreError when the agent cannot be saved.
    """
    files = AgentFiles.of(given)
    document = _read_document(files.document)
    scope = Scope(document.namespace, tenant_tag(store.secret, tenant))
    manifest = Manifest(
        scope,
        document.agent_id if name is None else name,
        document.token_ids,
        prompt_tokens=document.prompt_tokens,
        note=document.note,
        model=document.model,
        saved_at=time.time(),
    )
    _require_new(store, manifest)
    with opening(files.bodies) as file:
        try:
            for _ in _bodies(file, document):
                pass
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{files.bodies}: {error}") from error
        _put(store, manifest, document, file)
    if not store.save(manifest):
        raise StoreError(f"agent {manifest.agent_id!r} could not be saved")
    return Imported(manifest, len(document.bodies), sum(b.n_bytes for b in document.bodies))


def _read_document(path: Path) -> AgentDocument:
    with opening(path) as file:
        data = file.read(_LARGEST_DOCUMENT + 1)
    if len(data) > _LARGEST_DOCUMENT:
        raise InvalidRequestError(f"{path} is larger than {_LARGEST_DOCUMENT} bytes")
    try:
        return read_document(data)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from error


def _require_new(store: CacheStorePort, manifest: Manifest) -> None:
    if not manifest.agent_id:
        raise InvalidRequestError("an agent's name must not be empty")
    if store.manifest(manifest.scope, manifest.agent_id) is not None:
        raise InvalidRequestError(
            f"an agent {manifest.agent_id!r} of this model exists already; --as gives another name"
        )


def _bodies(file: BinaryIO, document: AgentDocument) -> Iterator[tuple[BodyEntry, bytes]]:
    """The bodies in order, each proven. Raises InvalidRequestError at the first that is not."""
    header = container_header(document.bodies)
    expected = len(header) + sum(body.n_bytes for body in document.bodies)
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise InvalidRequestError(f"expected {expected} bytes, it has {size}")
    file.seek(0)
    if file.read(len(header)) != header:
        raise InvalidRequestError("its header is not what the JSON file says")
    for entry in document.bodies:
        body = file.read(entry.n_bytes)
        if checksum(body) != entry.checksum:
            raise InvalidRequestError(f"body {entry.name} is damaged: its checksum does not hold")
        yield entry, body


def _put(
    store: CacheStorePort, manifest: Manifest, document: AgentDocument, file: BinaryIO
) -> None:
    links = list(manifest.scope.chain(manifest.token_ids))
    # Read and proven again: bodies are not held in memory, and a file may change meanwhile.
    for entry, body in _bodies(file, document):
        header = BlockHeader(links[entry.block], entry.part, document.layout)
        if not store.put(StoredBlock(header, body)):
            raise CapacityError(
                f"the store has no room for block {entry.block} of {len(links)}; "
                "a larger --disk-gb, or unpinned agents, make room"
            )
