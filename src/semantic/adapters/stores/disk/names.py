"""What the files of blocks and manifests are called: digests and fixed words only.

No text of a user ever becomes part of a path.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, unquote_to_bytes

from semantic.domain.block_hash import BlockHash, BlockKey, Part, Scope
from semantic.domain.digest import digest

PAGE = 4096
"""Files are counted in pages: the unit in which file systems give room."""
MOST_NUMBER = 1 << 62
"""The largest number that is taken from a file. The index holds twice that: counted on from here,
nothing runs over.
"""
_NAME_BYTES = 256
"""What a name costs in its folder, generously: folders split when they are full."""
_MOST_COST = 1 << 44
"""More than a budget is, so that half a million files with holes of any size can be added up."""
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

_BLOCK = re.compile(r"([0-9a-f]{64})\.(full|window|checkpoint)")
_MANIFEST = re.compile(r"([0-9a-f]{64})\.([0-9]{20})")


class Kind(StrEnum):
    """The folders that are divided into 256 shards by the first byte of their files' names."""

    BLOCKS = "blocks"
    AGENTS = "agents"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file in a shard."""

    kind: Kind
    name: str

    @property
    def shard(self) -> str:
        return self.name[:2]

    def __str__(self) -> str:
        return f"{self.kind}/{self.shard}/{self.name}"


def block_entry(key: BlockKey) -> Entry:
    return Entry(Kind.BLOCKS, f"{key.hash.hex()}.{key.part.value}")


def manifest_entry(agent: bytes, generation: int) -> Entry:
    return Entry(Kind.AGENTS, f"{agent.hex()}.{generation:020}")


def parse_block(name: str) -> BlockKey | None:
    """Whose block the file is, or None when it is not called like one."""
    match = _BLOCK.fullmatch(name)
    if match is None:
        return None
    return BlockKey(BlockHash(bytes.fromhex(match[1])), Part(match[2]))


def parse_manifest(name: str) -> tuple[bytes, int] | None:
    """Agent and generation of a manifest, or None when the file is not called like one."""
    match = _MANIFEST.fullmatch(name)
    return None if match is None else (bytes.fromhex(match[1]), int(match[2]))


def agent_key(scope: Scope, agent_id: str) -> bytes:
    """What stands for an agent in names, 32 bytes."""
    name = agent_id.encode("utf-8", "surrogatepass")
    return digest("agent-v1", scope.namespace, scope.tenant, name)


def cost_of(n_bytes: int) -> int:
    """What a file of `n_bytes` takes of the budget: whole pages, and its name."""
    return min(-(-n_bytes // PAGE) * PAGE + _NAME_BYTES, _MOST_COST)


def shown(name: str) -> str:
    """A foreign name of any bytes as plain text, escaped where it is not; no two become one."""
    return quote(os.fsencode(name), safe=_PRINTABLE)


def unshown(text: str) -> str:
    """The name that `shown` made `text` of."""
    return os.fsdecode(unquote_to_bytes(text))
