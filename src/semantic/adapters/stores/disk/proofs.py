"""Whether the index's rows are as they were written: SQLite finds no flipped bit inside a value.

A row's proof is a hash of what must not change in it. It says nothing of the files: rows that are
merely old prove as well, and are compared with the files. A row without proof raises
IndexBrokenError.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from semantic.adapters.stores.disk.index import IndexBrokenError, blob
from semantic.adapters.stores.disk.names import MOST_NUMBER
from semantic.domain.digest import digest

_PROOF_BYTES = 16
_MOST = MOST_NUMBER + (MOST_NUMBER >> 1)
"""No counter gets there; not far beyond, SQLite's numbers end."""

_BLOCKS = """
SELECT b.proof, b.hash, b.part, b.parent, b.start, b.n_tokens, b.body_bytes, t.packed,
    s.namespace, s.tenant, s.layout
FROM blocks AS b LEFT JOIN tokens AS t ON t.block = b.id LEFT JOIN scopes AS s ON s.id = b.scope
"""
_NUMBERS = f"""
SELECT (SELECT count(*) FROM numbers WHERE name IN ('bytes', 'clock')
    AND typeof(value) = 'integer' AND value BETWEEN 0 AND {_MOST}) = 2
    AND NOT EXISTS (SELECT 1 FROM blocks
        WHERE typeof(used) != 'integer' OR used NOT BETWEEN 0 AND {_MOST})
"""  # noqa: S608
_STRAYS = """
SELECT EXISTS (SELECT 1 FROM agents WHERE id NOT IN (SELECT agent FROM manifests))
    OR EXISTS (SELECT 1 FROM manifests WHERE agent NOT IN (SELECT id FROM agents))
    OR EXISTS (SELECT 1 FROM chain WHERE agent NOT IN (SELECT id FROM agents))
    OR EXISTS (SELECT 1 FROM tokens WHERE block NOT IN (SELECT id FROM blocks))
"""


def of_block(*values: object) -> bytes:
    """The proof of a block: its values in the order in which `prove` reads them."""
    return _hash("block-row-v1", values)


def of_agent(*values: object, chain: Iterable[bytes]) -> bytes:
    """The proof of an agent with the blocks that it needs, in any order."""
    return _hash("agent-row-v1", (*values, *sorted(set(chain))))


def prove(db: sqlite3.Connection) -> None:
    """Raise IndexBrokenError unless all rows are as they were written and belong together."""
    _require(db.execute(_NUMBERS).fetchone() == (1,), "a counter")
    _require(db.execute(_STRAYS).fetchone() == (0,), "a row that belongs to none")
    for proof, *values in db.execute(_BLOCKS):
        _require(of_block(*values) == proof, "a block's row")
    agents = db.execute("SELECT proof, id, key, pinned, saved, generation FROM agents")
    for proof, agent, *values in agents.fetchall():
        rows = db.execute("SELECT hash FROM chain WHERE agent = ?", (agent,))
        chain = [blob(row[0]) for row in rows]
        _require(of_agent(*values, chain=chain) == proof, "an agent's row")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IndexBrokenError(f"{what} is not what was written")


def _hash(domain: str, values: Iterable[object]) -> bytes:
    return digest(domain, *map(_bytes, values))[:_PROOF_BYTES]


def _bytes(value: object) -> bytes:
    """A value with its type: SQLite keeps any type in any column."""
    match value:
        case bytes():
            return b"b" + value
        case str():
            return b"t" + value.encode()
        case int():
            return b"i" + value.to_bytes(8, "little", signed=True)
        case _:
            raise IndexBrokenError(f"a row has no {type(value).__name__}")
