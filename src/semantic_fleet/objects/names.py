"""The paths of blocks and agents in the object store.

    NAMESPACE/TENANT/HASH.PART             a body
    NAMESPACE/TENANT/after/PARENT/HASH.PART  the header of a body that no full block names: a tail's
                                           or a checkpoint's, found by the block before it
    NAMESPACE/TENANT/after/PARENT/HASH.shared  says that turns of several agents end with the block
    NAMESPACE/TENANT/agents/KEY/GENERATION  a manifest; the highest generation counts

All names are digests; see `Vault` for TENANT.
"""

from __future__ import annotations

from dataclasses import dataclass

from semantic.adapters.stores.disk.block_file import layout_stamp
from semantic.adapters.stores.disk.entries import (
    agent_key,
    block_entry,
    manifest_entry,
    parse_manifest,
)
from semantic.domain.block_hash import BlockHash, BlockKey, BlockLink, Part, Scope, pack_tokens
from semantic.domain.identity import digest
from semantic.domain.stored import BlockHeader
from semantic_fleet.objects.objects import Listed
from semantic_fleet.objects.sealing import Tenant
from semantic_fleet.objects.uses import name_of


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a scope in the object store, and the tenant's key."""

    scope: Scope
    tenant: Tenant

    def body(self, key: BlockKey) -> str:
        return self._path(block_entry(key).name)

    def after(self, parent: BlockHash) -> str:
        """Return the folder of the separate headers of bodies that follow the block `parent`."""
        return self._path(f"after/{parent.hex()}")

    def tail(self, key: BlockKey, parent: BlockHash) -> str:
        """Return the path of the separate header of the body `key`."""
        return f"{self.after(parent)}/{block_entry(key).name}"

    def shared(self, link: BlockLink) -> str:
        """Return the path of the object that marks a block as shared."""
        return f"{self.after(link.parent)}/{link.hash.hex()}.shared"

    def agent(self, agent_id: str) -> str:
        """Return the folder that contains an agent's manifests."""
        return self._path(f"agents/{agent_key(self.scope, agent_id).hex()}")

    def manifest(self, agent_id: str, generation: int) -> str:
        entry = manifest_entry(agent_key(self.scope, agent_id), generation)
        return f"{self.agent(agent_id)}/{entry.name}"

    def _path(self, name: str) -> str:
        return f"{self.scope.namespace.hex()}/{self.tenant.folder}/{name}"


def has_tail(header: BlockHeader) -> bool:
    """Return True if the body's header needs a separate object."""
    return header.part is Part.CHECKPOINT or (header.part is Part.FULL and not header.link.is_full)


def name_of_body(key: BlockKey) -> int:
    """Return a body's id in the logs of `uses`."""
    return name_of(block_entry(key).name)


def depth_of(header: BlockHeader) -> int:
    """Return the depth of a body. It increases along a chain of blocks."""
    return 2 * header.link.start + (header.part is not Part.FULL)


def last_name(listed: Listed) -> str:
    """Return the name of a listed object without its folder."""
    return listed.path.rsplit("/", 1)[-1]


def generation_of(listed: Listed) -> int:
    """Return the generation of a listed manifest, or 0 for any other object."""
    parsed = parse_manifest(last_name(listed))
    return 0 if parsed is None else parsed[1]


def body_identity(header: BlockHeader) -> bytes:
    """Return the identity that binds a body to every field of its header."""
    link = header.link
    return digest(
        "remote-body-v1",
        link.scope.namespace,
        link.scope.tenant,
        link.hash,
        link.parent,
        link.start.to_bytes(8, "little"),
        pack_tokens(link.tokens),
        header.part.encode(),
        layout_stamp(header.layout).encode(),
    )


def tail_identity(key: BlockKey) -> bytes:
    """Return the identity that binds a header to the body `key`."""
    return digest("remote-tail-v1", key.hash, key.part.encode())


def manifest_identity(agent: bytes, generation: int) -> bytes:
    """Return the identity that binds a manifest to its agent and generation."""
    return digest("remote-manifest-v1", agent, generation.to_bytes(8, "little"))
