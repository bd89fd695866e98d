"""The index's rows of agents: the generations of their manifests, the blocks of their chains.

Functions on an open connection; those that write must be called inside a transaction. Knows no
files.
"""

from __future__ import annotations

import sqlite3

from semantic.adapters.stores.disk import block_rows, schema
from semantic.adapters.stores.disk.entries import cost_of
from semantic.adapters.stores.disk.manifest_file import FiledManifest, ManifestFile
from semantic.adapters.stores.disk.schema import blob, whole
from semantic.domain.block_hash import BlockHash


def keys(db: sqlite3.Connection) -> list[bytes]:
    """The key of every agent, last saved first."""
    rows = db.execute("SELECT key FROM agents ORDER BY saved DESC, id DESC")
    return [blob(row[0]) for row in rows]


def generations(db: sqlite3.Connection, key: bytes) -> list[int]:
    """The agent's stored generations, newest first; empty when it has no row."""
    rows = db.execute(
        "SELECT m.generation FROM manifests AS m JOIN agents AS a ON a.id = m.agent"
        " WHERE a.key = ? ORDER BY m.generation DESC",
        (key,),
    )
    return [whole(row[0]) for row in rows]


def all_manifests(db: sqlite3.Connection) -> dict[tuple[bytes, int], tuple[int, bytes]]:
    """Cost and first bytes of each manifest's file, by agent and generation."""
    rows = db.execute(
        "SELECT a.key, m.generation, m.cost, m.frame"
        " FROM manifests AS m JOIN agents AS a ON a.id = m.agent"
    )
    return {(blob(row[0]), whole(row[1])): (whole(row[2]), blob(row[3])) for row in rows}


def outdated(db: sqlite3.Connection) -> list[bytes]:
    """The agents with a chain that is not that of their newest manifest."""
    rows = db.execute(
        "SELECT key FROM agents AS a WHERE generation IS NOT"
        " (SELECT max(generation) FROM manifests WHERE agent = a.id)"
    )
    return [blob(row[0]) for row in rows]


def add(db: sqlite3.Connection, filed: FiledManifest, file: ManifestFile) -> list[BlockHash]:
    """Insert an installed manifest as its agent's newest; the hashes of its chain."""
    manifest = filed.manifest
    hashes = [link.hash for link in manifest.scope.chain(manifest.token_ids)]
    own = (filed.key, int(manifest.pinned), filed.order, manifest.generation)
    db.execute(
        "INSERT INTO agents(key, pinned, saved, generation, proof) VALUES (?1, ?2, ?3, ?4, ?5)"
        " ON CONFLICT (key) DO UPDATE SET pinned = ?2, saved = ?3, generation = ?4, proof = ?5",
        (*own, schema.agent_proof(*own, chain=hashes)),
    )
    agent = _id(db, filed.key)
    db.execute(
        "INSERT OR REPLACE INTO manifests VALUES (?, ?, ?, ?)",
        (agent, manifest.generation, cost_of(file.n_bytes), file.frame),
    )
    before = _chain(db, agent)
    db.execute("DELETE FROM chain WHERE agent = ?", (agent,))
    db.executemany("INSERT INTO chain VALUES (?, ?)", ((agent, one) for one in set(hashes)))
    block_rows.update_pins(db, {*before, *hashes})
    return hashes


def drop_generation(db: sqlite3.Connection, key: bytes, generation: int) -> None:
    """Delete the row of one manifest; with the last one the agent's row too."""
    db.execute(
        "DELETE FROM manifests WHERE agent = ? AND generation = ?",
        (_id(db, key), generation),
    )
    if not generations(db, key):
        drop(db, key)


def drop(db: sqlite3.Connection, key: bytes) -> None:
    """Delete an agent's rows; its blocks become unreferenced unless another agent shares them."""
    agent = _id(db, key)
    hashes = _chain(db, agent)
    db.execute("DELETE FROM manifests WHERE agent = ?", (agent,))
    db.execute("DELETE FROM chain WHERE agent = ?", (agent,))
    db.execute("DELETE FROM agents WHERE id = ?", (agent,))
    block_rows.update_pins(db, hashes)


def lru_victim(db: sqlite3.Connection, spared: bytes | None) -> bytes | None:
    """The agent that was saved longest ago and is neither pinned nor `spared`; None if none."""
    row = db.execute(
        "SELECT key FROM agents WHERE NOT pinned AND key IS NOT ? ORDER BY saved LIMIT 1",
        (spared,),
    ).fetchone()
    return None if row is None else blob(row[0])


def chain_of(db: sqlite3.Connection, key: bytes) -> list[BlockHash]:
    """The blocks that the agent's newest manifest needs, unordered."""
    return _chain(db, _id(db, key))


def count(db: sqlite3.Connection) -> int:
    return whole(db.execute("SELECT count(*) FROM agents").fetchone()[0])


def _chain(db: sqlite3.Connection, agent: int) -> list[BlockHash]:
    rows = db.execute("SELECT hash FROM chain WHERE agent = ?", (agent,))
    return [BlockHash(blob(row[0])) for row in rows]


def _id(db: sqlite3.Connection, key: bytes) -> int:
    """The agent's row id; -1, which no row has, when there is none."""
    row = db.execute("SELECT id FROM agents WHERE key = ?", (key,)).fetchone()
    return -1 if row is None else whole(row[0])
