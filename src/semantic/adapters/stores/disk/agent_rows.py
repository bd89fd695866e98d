"""The index's rows of agents and their manifests.

Functions that write require a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from semantic.adapters.stores.disk import block_rows, schema
from semantic.adapters.stores.disk.entries import cost_of
from semantic.adapters.stores.disk.manifest_file import FiledManifest, ManifestFile
from semantic.adapters.stores.disk.schema import blob, whole
from semantic.domain.block_hash import BlockHash, Scope
from semantic.domain.stored import AgentName, Place, packed_name

_UPSERT = (
    "INSERT INTO agents(key, pinned, saved, generation, namespace, tenant, name, parent, time,"
    " proof) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"
    " ON CONFLICT (key) DO UPDATE SET pinned = ?2, saved = ?3, generation = ?4, namespace = ?5,"
    " tenant = ?6, name = ?7, parent = ?8, time = ?9, proof = ?10"
)
_LAST: Place = ((1 << 63) - 1, b"\xff")
"""A place before all agents in the list."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An agent's key and its place in the list of agents."""

    key: bytes
    place: Place


def generations(db: sqlite3.Connection, key: bytes) -> list[int]:
    """Return the agent's stored generations, newest first."""
    rows = db.execute(
        "SELECT m.generation FROM manifests AS m JOIN agents AS a ON a.id = m.agent"
        " WHERE a.key = ? ORDER BY m.generation DESC",
        (key,),
    )
    return [whole(row[0]) for row in rows]


def all_manifests(db: sqlite3.Connection) -> dict[tuple[bytes, int], tuple[int, bytes]]:
    """Return the quota cost and the first bytes of each manifest's file."""
    rows = db.execute(
        "SELECT a.key, m.generation, m.cost, m.frame"
        " FROM manifests AS m JOIN agents AS a ON a.id = m.agent"
    )
    return {(blob(row[0]), whole(row[1])): (whole(row[2]), blob(row[3])) for row in rows}


def outdated(db: sqlite3.Connection) -> list[bytes]:
    """Return the agents whose rows differ from their newest manifest."""
    rows = db.execute(
        "SELECT key FROM agents AS a WHERE generation IS NOT"
        " (SELECT max(generation) FROM manifests WHERE agent = a.id)"
    )
    return [blob(row[0]) for row in rows]


def add(db: sqlite3.Connection, filed: FiledManifest, file: ManifestFile) -> list[BlockHash]:
    """Insert an agent's newest manifest; return the hashes of its blocks."""
    manifest = filed.manifest
    hashes = [link.hash for link in manifest.scope.chain(manifest.token_ids)]
    own = _row(filed)
    db.execute(_UPSERT, (*own, schema.agent_proof(*own, chain=hashes)))
    agent = _id(db, filed.key)
    # Delete before inserting: the triggers that maintain the sums fire on DELETE and INSERT only.
    db.execute(
        "DELETE FROM manifests WHERE agent = ? AND generation = ?", (agent, manifest.generation)
    )
    db.execute(
        "INSERT INTO manifests VALUES (?, ?, ?, ?)",
        (agent, manifest.generation, cost_of(file.n_bytes), file.frame),
    )
    before = _chain(db, agent)
    db.execute("DELETE FROM chain WHERE agent = ?", (agent,))
    pinned = int(manifest.pinned)
    rows = ((agent, one, pinned) for one in set(hashes))
    db.executemany("INSERT INTO chain VALUES (?, ?, ?)", rows)
    block_rows.update_pins(db, {*before, *hashes})
    return hashes


def drop_generation(db: sqlite3.Connection, key: bytes, generation: int) -> None:
    """Delete a manifest's row. Also deletes the agent's rows with its last manifest."""
    db.execute(
        "DELETE FROM manifests WHERE agent = ? AND generation = ?", (_id(db, key), generation)
    )
    if not generations(db, key):
        drop(db, key)


def drop(db: sqlite3.Connection, key: bytes) -> None:
    """Delete an agent's rows."""
    agent = _id(db, key)
    hashes = _chain(db, agent)
    db.execute("DELETE FROM manifests WHERE agent = ?", (agent,))
    db.execute("DELETE FROM chain WHERE agent = ?", (agent,))
    db.execute("DELETE FROM agents WHERE id = ?", (agent,))
    block_rows.update_pins(db, hashes)


def lru_victim(
    db: sqlite3.Connection, tenant: bytes, spared: bytes | None, *, pinned: bool
) -> bytes | None:
    """Return the tenant's agent that was saved longest ago, or None. Searches either pinned or
    unpinned agents, except `spared`."""
    row = db.execute(
        "SELECT key FROM agents WHERE tenant = ? AND pinned = ? AND key IS NOT ?"
        " ORDER BY saved LIMIT 1",
        (tenant, int(pinned), spared),
    ).fetchone()
    return None if row is None else blob(row[0])


def chain_of(db: sqlite3.Connection, key: bytes) -> list[BlockHash]:
    """Return the hashes of the agent's blocks, unordered."""
    return _chain(db, _id(db, key))


# Listing


def page(db: sqlite3.Connection, *, scope: Scope, limit: int, after: Place | None) -> list[Listed]:
    """Return at most `limit` agents after the place `after`, newest first."""
    time, name = _LAST if after is None else after
    rows = db.execute(
        "SELECT key, time, name FROM agents"
        " WHERE tenant = ? AND namespace = ? AND (time, name) < (?, ?)"
        " ORDER BY time DESC, name DESC LIMIT ?",
        (scope.tenant, scope.namespace, time, name, limit),
    )
    return [Listed(blob(row[0]), (whole(row[1]), blob(row[2]))) for row in rows]


def tenants(db: sqlite3.Connection) -> list[bytes]:
    """Return the tags of all tenants that have agents."""
    return [blob(row[0]) for row in db.execute("SELECT tag FROM tenants WHERE n_agents > 0")]


def bytes_of(db: sqlite3.Connection, tenant: bytes) -> tuple[int, int]:
    """Return the bytes of a tenant's blocks and manifests, and the bytes of pinned agents."""
    row = db.execute("SELECT bytes, pinned FROM tenants WHERE tag = ?", (tenant,)).fetchone()
    return (0, 0) if row is None else (whole(row[0]), whole(row[1]))


def larger(db: sqlite3.Connection, n_bytes: int) -> list[bytes]:
    """Return the tenants that use more than `n_bytes`, largest first."""
    rows = db.execute("SELECT tag FROM tenants WHERE bytes > ? ORDER BY bytes DESC", (n_bytes,))
    return [blob(row[0]) for row in rows]


def namespaces(db: sqlite3.Connection, tenant: bytes) -> list[bytes]:
    """Return the namespaces in which a tenant has agents."""
    rows = db.execute(
        "WITH RECURSIVE known(one) AS ("
        " SELECT min(namespace) FROM agents WHERE tenant = ?1 UNION ALL"
        " SELECT (SELECT min(namespace) FROM agents WHERE tenant = ?1 AND namespace > known.one)"
        " FROM known WHERE known.one IS NOT NULL)"
        " SELECT one FROM known WHERE one IS NOT NULL",
        (tenant,),
    )
    return [blob(row[0]) for row in rows]


def children(db: sqlite3.Connection, scope: Scope, parent: str) -> list[str]:
    """Return the names of the agents whose parent is `parent`, sorted."""
    rows = db.execute(
        "SELECT name FROM agents WHERE tenant = ? AND namespace = ? AND parent = ? ORDER BY name",
        (scope.tenant, scope.namespace, packed_name(parent)),
    )
    return [blob(row[0]).decode("utf-8", "surrogatepass") for row in rows]


def users(
    db: sqlite3.Connection, hashes: Sequence[BlockHash]
) -> dict[BlockHash, frozenset[AgentName]]:
    """Return up to two agents that need a block, for each of the blocks `hashes`."""
    found = {}
    for one in hashes:
        rows = db.execute(
            "SELECT a.namespace, a.tenant, a.name FROM chain AS c"
            " JOIN agents AS a ON a.id = c.agent WHERE c.hash = ? LIMIT 2",
            (one,),
        ).fetchall()
        found[one] = frozenset(
            (Scope(blob(row[0]), blob(row[1])), blob(row[2]).decode("utf-8", "surrogatepass"))
            for row in rows
        )
    return found


def count_of(db: sqlite3.Connection, tenant: bytes) -> int:
    row = db.execute("SELECT n_agents FROM tenants WHERE tag = ?", (tenant,)).fetchone()
    return 0 if row is None else whole(row[0])


def _row(filed: FiledManifest) -> tuple[object, ...]:
    # In the order of `_UPSERT` and `schema.verify_rows`
    manifest = filed.manifest
    time, name = manifest.place
    return (
        filed.key,
        int(manifest.pinned),
        filed.order,
        manifest.generation,
        manifest.scope.namespace,
        manifest.scope.tenant,
        name,
        packed_name(manifest.parent or ""),
        time,
    )


def _chain(db: sqlite3.Connection, agent: int) -> list[BlockHash]:
    rows = db.execute("SELECT hash FROM chain WHERE agent = ?", (agent,))
    return [BlockHash(blob(row[0])) for row in rows]


def _id(db: sqlite3.Connection, key: bytes) -> int:
    # -1 is the id of no row.
    row = db.execute("SELECT id FROM agents WHERE key = ?", (key,)).fetchone()
    return -1 if row is None else whole(row[0])
