"""What the index knows about agents: their manifests' generations and the blocks they need.

Functions on an open connection; those that change something belong into a transaction. Knows no
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
    """Every agent, last saved first."""
    rows = db.execute("SELECT key FROM agents ORDER BY saved DESC, id DESC")
    return [blob(row[0]) for row in rows]


def generations(db: sqlite3.Connection, key: bytes) -> list[int]:
    """The agent's generations that are there, the newest first; none when it is not known."""
    rows = db.execute(
        "SELECT m.generation FROM manifests AS m JOIN agents AS a ON a.id = m.agent"
        " WHERE a.key = ? ORDER BY m.generation DESC",
        (key,),
    )
    return [whole(row[0]) for row in rows]


def all_manifests(db: sqlite3.Connection) -> dict[tuple[bytes, int], tuple[int, bytes]]:
    """What every manifest costs, and what its file begins with."""
    rows = db.execute(
        "SELECT a.key, m.generation, m.cost, m.frame"
        " FROM manifests AS m JOIN agents AS a ON a.id = m.agent"
    )
    return {(blob(row[0]), whole(row[1])): (whole(row[2]), blob(row[3])) for row in rows}


def outdated(db: sqlite3.Connection) -> list[bytes]:
    """The agents whose chain is not that of their newest manifest."""
    rows = db.execute(
        "SELECT key FROM agents AS a WHERE generation IS NOT"
        " (SELECT max(generation) FROM manifests WHERE agent = a.id)"
    )
    return [blob(row[0]) for row in rows]


def add(db: sqlite3.Connection, filed: FiledManifest, file: ManifestFile) -> list[BlockHash]:
    """Remember a manifest whose file is in place, as its agent's newest; its chain."""
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
    """Forget one manifest, and the agent with its last."""
    db.execute(
        "DELETE FROM manifests WHERE agent = ? AND generation = ?", (_id(db, key), generation)
    )
    if not generations(db, key):
        drop(db, key)


def drop(db: sqlite3.Connection, key: bytes) -> None:
    """Forget an agent; its blocks are nobody's then, unless another agent has them too."""
    agent = _id(db, key)
    hashes = _chain(db, agent)
    db.execute("DELETE FROM manifests WHERE agent = ?", (agent,))
    db.execute("DELETE FROM chain WHERE agent = ?", (agent,))
    db.execute("DELETE FROM agents WHERE id = ?", (agent,))
    block_rows.update_pins(db, hashes)


def next_victim(db: sqlite3.Connection, spared: bytes | None) -> bytes | None:
    """The agent that was saved longest ago and is not pinned."""
    row = db.execute(
        "SELECT key FROM agents WHERE NOT pinned AND key IS NOT ? ORDER BY saved LIMIT 1", (spared,)
    ).fetchone()
    return None if row is None else blob(row[0])


def chain_of(db: sqlite3.Connection, key: bytes) -> list[BlockHash]:
    """The blocks that the agent's newest manifest needs, in no order."""
    return _chain(db, _id(db, key))


def count(db: sqlite3.Connection) -> int:
    return whole(db.execute("SELECT count(*) FROM agents").fetchone()[0])


def _chain(db: sqlite3.Connection, agent: int) -> list[BlockHash]:
    rows = db.execute("SELECT hash FROM chain WHERE agent = ?", (agent,))
    return [BlockHash(blob(row[0])) for row in rows]


def _id(db: sqlite3.Connection, key: bytes) -> int:
    """The agent's number; -1, which no agent has, when it is not known."""
    row = db.execute("SELECT id FROM agents WHERE key = ?", (key,)).fetchone()
    return -1 if row is None else whole(row[0])
