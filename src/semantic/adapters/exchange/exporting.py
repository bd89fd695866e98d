"""Writes an agent and its blocks to files. Knows the store by its port; no model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from semantic.adapters.exchange.agent_files import AgentFiles, creating
from semantic.adapters.exchange.container import container_header
from semantic.adapters.exchange.document import (
    AgentDocument,
    BodyEntry,
    checksum,
    write_document,
)
from semantic.domain.block_hash import BlockLink, Part
from semantic.domain.errors import InvalidRequestError
from semantic.domain.stored import BlockHeader, Manifest
from semantic.ports.store import CacheStorePort

_UNKNOWN = "0" * 32
"""Stands for a checksum while sizes are all that matters."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: files, bodies, and how many blocks the agent has in all."""

    files: AgentFiles
    n_bodies: int
    n_bytes: int
    n_blocks: int
    missing_blocks: int
    """Blocks of which nothing was there; whoever imports the agent computes them again."""


def export_agent(store: CacheStorePort, manifest: Manifest, given: Path) -> Exported:
    """Write what the store has of an agent to two new files.

    Raises InvalidRequestError when one of them exists, cannot be written, or when a body cannot
    be read; then neither stays.
    """
    files = AgentFiles.of(given)
    if os.path.lexists(files.document):
        raise InvalidRequestError(f"{files.document} exists already; choose another name")
    links = list(manifest.scope.chain(manifest.token_ids))
    headers = dict(_headers(store, links))
    found = store.find([header.key for header in headers.values()])
    planned = [
        BodyEntry(block, part, found[header.key].n_bytes, _UNKNOWN)
        for (block, part), header in headers.items()
        if header.key in found
    ]
    with creating(files.bodies) as file:
        file.write(container_header(planned))
        bodies = []
        for entry in planned:
            body = _read(store, headers[entry.block, entry.part], entry)
            file.write(body)
            bodies.append(BodyEntry(entry.block, entry.part, len(body), checksum(body)))
        document = AgentDocument(
            namespace=manifest.scope.namespace,
            layout=next((header.layout for header in headers.values()), ""),
            agent_id=manifest.agent_id,
            model=manifest.model,
            note=manifest.note,
            prompt_tokens=manifest.prompt_tokens,
            token_ids=manifest.token_ids,
            bodies=tuple(bodies),
        )
        # Last, and inside: without its document the other file goes too.
        with creating(files.document) as described:
            described.write(write_document(document))
    present = {body.block for body in bodies}
    n_bytes = sum(body.n_bytes for body in bodies)
    return Exported(files, len(bodies), n_bytes, len(links), len(links) - len(present))


def _headers(
    store: CacheStorePort, links: list[BlockLink]
) -> Iterator[tuple[tuple[int, Part], BlockHeader]]:
    """The header of every body that the store knows, by number of its block and part."""
    for block, link in enumerate(links):
        for part in Part:
            for header in store.children(link.parent, part):
                if header.link == link:
                    yield (block, part), header


def _read(store: CacheStorePort, header: BlockHeader, entry: BodyEntry) -> bytes:
    body = store.read(header)
    if body is None or len(body) != entry.n_bytes:
        raise InvalidRequestError(
            f"body {entry.name} cannot be read any more: it was evicted or is damaged; "
            "export again for what is left"
        )
    return body
