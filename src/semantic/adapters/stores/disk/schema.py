"""The tables of the index, and checksums that detect changed rows.

The store can derive all rows from its files. `blocks.used` and `agents.saved` are values of a
counter that grows with each use, not times. `proof` is a checksum of a row, because SQLite does not
detect a flipped bit.

A row of `tokens` has `width` bytes per token: 3, or 4 if an id needs 4 bytes. Triggers maintain the
sums.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from semantic.adapters.stores.disk.entries import MAX_NUMBER
from semantic.domain.block_hash import TOKEN_BYTES, BlockHash
from semantic.domain.identity import digest
from semantic.domain.value_objects import BLOCK_TOKENS

VERSION = 4

_COSTLY = ("blocks", "manifests", "reservations", "others")

_TABLES = """
CREATE TABLE numbers(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE scopes(
    id INTEGER PRIMARY KEY, namespace BLOB NOT NULL, tenant BLOB NOT NULL, layout TEXT NOT NULL,
    UNIQUE (namespace, tenant, layout));
CREATE INDEX scopes_by_tenant ON scopes(tenant);
CREATE TABLE blocks(
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL, part TEXT NOT NULL, parent BLOB NOT NULL,
    scope INTEGER NOT NULL, start INTEGER NOT NULL, n_tokens INTEGER NOT NULL,
    body_bytes INTEGER NOT NULL, cost INTEGER NOT NULL, used INTEGER NOT NULL,
    pinned INTEGER NOT NULL, proof BLOB NOT NULL, UNIQUE (hash, part));
CREATE INDEX blocks_by_parent ON blocks(parent);
CREATE INDEX blocks_by_use ON blocks(scope, pinned, used, start DESC);
CREATE TABLE tokens(
    parent BLOB NOT NULL, part TEXT NOT NULL, width INTEGER NOT NULL, packed BLOB NOT NULL,
    block INTEGER NOT NULL, PRIMARY KEY (parent, part, width, packed, block)) WITHOUT ROWID;
CREATE UNIQUE INDEX tokens_by_block ON tokens(block);
CREATE TRIGGER tokens_go AFTER DELETE ON blocks
    BEGIN DELETE FROM tokens WHERE block = old.id; END;
CREATE TABLE agents(
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, pinned INTEGER NOT NULL,
    saved INTEGER NOT NULL, generation INTEGER NOT NULL, namespace BLOB NOT NULL,
    tenant BLOB NOT NULL, name BLOB NOT NULL, parent BLOB NOT NULL, time INTEGER NOT NULL,
    proof BLOB NOT NULL);
CREATE INDEX agents_by_save ON agents(tenant, pinned, saved);
CREATE INDEX agents_by_time ON agents(tenant, namespace, time, name);
CREATE INDEX agents_by_parent ON agents(tenant, namespace, parent, name);
CREATE TABLE manifests(
    agent INTEGER NOT NULL, generation INTEGER NOT NULL, cost INTEGER NOT NULL,
    frame BLOB NOT NULL, PRIMARY KEY (agent, generation)) WITHOUT ROWID;
CREATE TABLE chain(
    agent INTEGER NOT NULL, hash BLOB NOT NULL, pinned INTEGER NOT NULL,
    PRIMARY KEY (agent, hash)) WITHOUT ROWID;
CREATE INDEX chain_by_hash ON chain(hash, pinned);
CREATE TABLE reservations(id INTEGER PRIMARY KEY, session TEXT NOT NULL, cost INTEGER NOT NULL);
CREATE TABLE others(name TEXT PRIMARY KEY, cost INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE shards(name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE tenants(
    tag BLOB PRIMARY KEY, n_agents INTEGER NOT NULL, bytes INTEGER NOT NULL,
    pinned INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX tenants_by_size ON tenants(bytes);
INSERT INTO numbers VALUES ('agents', 0), ('blocks', 0), ('bytes', 0), ('clock', 0), ('pinned', 0);
"""

_SUM_TRIGGERS = """
CREATE TRIGGER {table}_come AFTER INSERT ON {table}
    BEGIN UPDATE numbers SET value = value + new.cost WHERE name = 'bytes'; END;
CREATE TRIGGER {table}_go AFTER DELETE ON {table}
    BEGIN UPDATE numbers SET value = value - old.cost WHERE name = 'bytes'; END;
"""

_PINNED_COST = "(SELECT coalesce(sum(cost), 0) FROM manifests WHERE agent = new.id)"
_OF_SCOPE = "tag = (SELECT tenant FROM scopes WHERE id = {row}.scope)"
_OF_AGENT = "tag = (SELECT tenant FROM agents WHERE id = {row}.agent)"
_IS_PINNED = "(SELECT pinned FROM agents WHERE id = {row}.agent)"
_COUNT_TRIGGERS = f"""
CREATE TRIGGER blocks_counted AFTER INSERT ON blocks BEGIN
    UPDATE numbers SET value = value + 1 WHERE name = 'blocks';
    UPDATE numbers SET value = value + new.cost WHERE name = 'pinned' AND new.pinned;
    INSERT OR IGNORE INTO tenants SELECT tenant, 0, 0, 0 FROM scopes WHERE id = new.scope;
    UPDATE tenants SET bytes = bytes + new.cost, pinned = pinned + new.cost * new.pinned
        WHERE {_OF_SCOPE.format(row="new")};
END;
CREATE TRIGGER blocks_uncounted AFTER DELETE ON blocks BEGIN
    UPDATE numbers SET value = value - 1 WHERE name = 'blocks';
    UPDATE numbers SET value = value - old.cost WHERE name = 'pinned' AND old.pinned;
    UPDATE tenants SET bytes = bytes - old.cost, pinned = pinned - old.cost * old.pinned
        WHERE {_OF_SCOPE.format(row="old")};
END;
CREATE TRIGGER blocks_pinned AFTER UPDATE OF pinned ON blocks WHEN new.pinned != old.pinned BEGIN
    UPDATE numbers SET value = value + (new.pinned - old.pinned) * new.cost WHERE name = 'pinned';
    UPDATE tenants SET pinned = pinned + (new.pinned - old.pinned) * new.cost
        WHERE {_OF_SCOPE.format(row="new")};
END;
CREATE TRIGGER manifests_pinned AFTER INSERT ON manifests BEGIN
    UPDATE numbers SET value = value + new.cost WHERE name = 'pinned'
        AND {_IS_PINNED.format(row="new")};
    UPDATE tenants SET bytes = bytes + new.cost,
        pinned = pinned + new.cost * {_IS_PINNED.format(row="new")}
        WHERE {_OF_AGENT.format(row="new")};
END;
CREATE TRIGGER manifests_unpinned AFTER DELETE ON manifests BEGIN
    UPDATE numbers SET value = value - old.cost WHERE name = 'pinned'
        AND {_IS_PINNED.format(row="old")};
    UPDATE tenants SET bytes = bytes - old.cost,
        pinned = pinned - old.cost * {_IS_PINNED.format(row="old")}
        WHERE {_OF_AGENT.format(row="old")};
END;
CREATE TRIGGER agents_counted AFTER INSERT ON agents BEGIN
    UPDATE numbers SET value = value + 1 WHERE name = 'agents';
    INSERT INTO tenants VALUES (new.tenant, 1, 0, 0)
        ON CONFLICT (tag) DO UPDATE SET n_agents = n_agents + 1;
END;
CREATE TRIGGER agents_uncounted AFTER DELETE ON agents BEGIN
    UPDATE numbers SET value = value - 1 WHERE name = 'agents';
    UPDATE tenants SET n_agents = n_agents - 1 WHERE tag = old.tenant;
END;
CREATE TRIGGER agents_pinned AFTER UPDATE OF pinned ON agents WHEN new.pinned != old.pinned BEGIN
    UPDATE numbers SET value = value + (new.pinned - old.pinned) * {_PINNED_COST}
        WHERE name = 'pinned';
    UPDATE tenants SET pinned = pinned + (new.pinned - old.pinned) * {_PINNED_COST}
        WHERE tag = new.tenant;
END;
"""  # noqa: S608

SCRIPT = _TABLES + "".join(_SUM_TRIGGERS.format(table=table) for table in _COSTLY) + _COUNT_TRIGGERS
_NOTE_REMOVAL = f"""
CREATE TEMP TRIGGER IF NOT EXISTS note_removal AFTER DELETE ON main.blocks
    WHEN old.part = 'full' AND old.n_tokens = {BLOCK_TOKENS}
    BEGIN INSERT INTO removed VALUES (old.hash); END
"""  # noqa: S608
_RECOUNTS = (
    """
UPDATE numbers SET value = (
    SELECT (SELECT coalesce(sum(cost), 0) FROM blocks)
        + (SELECT coalesce(sum(cost), 0) FROM manifests)
        + (SELECT coalesce(sum(cost), 0) FROM reservations)
        + (SELECT coalesce(sum(cost), 0) FROM others))
WHERE name = 'bytes'
""",
    "UPDATE numbers SET value = (SELECT count(*) FROM blocks) WHERE name = 'blocks'",
    "UPDATE numbers SET value = (SELECT count(*) FROM agents) WHERE name = 'agents'",
    """
UPDATE numbers SET value = (
    SELECT (SELECT coalesce(sum(cost), 0) FROM blocks WHERE pinned)
        + (SELECT coalesce(sum(m.cost), 0) FROM manifests AS m JOIN agents AS a ON a.id = m.agent
            WHERE a.pinned))
WHERE name = 'pinned'
""",
    "DELETE FROM tenants",
    """
INSERT INTO tenants SELECT tag, sum(n_agents), sum(bytes), sum(pinned) FROM (
    SELECT tenant AS tag, 1 AS n_agents, 0 AS bytes, 0 AS pinned FROM agents
    UNION ALL SELECT s.tenant, 0, b.cost, b.cost * b.pinned
        FROM blocks AS b JOIN scopes AS s ON s.id = b.scope
    UNION ALL SELECT a.tenant, 0, m.cost, m.cost * a.pinned
        FROM manifests AS m JOIN agents AS a ON a.id = m.agent)
GROUP BY tag
""",
)

_PROOF_BYTES = 16
_WIDTHS = (3, TOKEN_BYTES)
_BEFORE_TOKENS = 6
"""The number of values before the tokens in a block's checksum."""
_MAX_COUNTER = MAX_NUMBER + (MAX_NUMBER >> 1)
"""A number above every counter, near SQLite's largest integer."""

_BLOCKS = """
SELECT t.width, t.packed, b.proof, b.hash, b.part, b.parent, b.start, b.n_tokens, b.body_bytes,
    s.namespace, s.tenant, s.layout
FROM blocks AS b LEFT JOIN scopes AS s ON s.id = b.scope
    LEFT JOIN tokens AS t ON t.block = b.id AND t.parent = b.parent AND t.part = b.part
"""
_NUMBERS = f"""
SELECT (SELECT count(*) FROM numbers
    WHERE name IN ('agents', 'blocks', 'bytes', 'clock', 'pinned')
    AND typeof(value) = 'integer' AND value BETWEEN 0 AND {_MAX_COUNTER}) = 5
    AND NOT EXISTS (SELECT 1 FROM blocks
        WHERE typeof(used) != 'integer' OR used NOT BETWEEN 0 AND {_MAX_COUNTER})
"""  # noqa: S608
_STRAYS = """
SELECT EXISTS (SELECT 1 FROM agents WHERE id NOT IN (SELECT agent FROM manifests))
    OR EXISTS (SELECT 1 FROM manifests WHERE agent NOT IN (SELECT id FROM agents))
    OR EXISTS (SELECT 1 FROM chain AS c WHERE c.pinned IS NOT
        (SELECT pinned FROM agents WHERE id = c.agent))
    OR EXISTS (SELECT 1 FROM tokens WHERE block NOT IN (SELECT id FROM blocks))
"""


class IndexBrokenError(Exception):
    """The index needs a rebuild from the files."""


# The database


def create(db: sqlite3.Connection) -> None:
    """Create the tables. Call this in a transaction, so that an error leaves no tables."""
    statement = ""
    for line in SCRIPT.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""
    db.execute(f"PRAGMA user_version = {VERSION}")


def is_sound(db: sqlite3.Connection) -> bool:
    """Return whether the version, the tables and SQLite's integrity check are right."""
    if db.execute("PRAGMA user_version").fetchone() != (VERSION,):
        return False
    if db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
        return False
    fresh = sqlite3.connect(":memory:", isolation_level=None)
    try:
        create(fresh)
        return _definitions(db) == _definitions(fresh)
    finally:
        fresh.close()


def _definitions(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = db.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
    ).fetchall()
    return rows


def watch_removals(db: sqlite3.Connection) -> None:
    """Let this connection note the hashes of complete blocks whose rows it deletes."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'blocks'").fetchone() is None:
        return  # the index is still being created
    db.execute("CREATE TEMP TABLE IF NOT EXISTS removed(hash BLOB)")
    db.execute(_NOTE_REMOVAL)


def take_removals(db: sqlite3.Connection) -> list[BlockHash]:
    """Return the hashes noted since the last call."""
    if db.execute("SELECT 1 FROM temp.sqlite_master WHERE name = 'removed'").fetchone() is None:
        return []
    removed = [BlockHash(blob(row[0])) for row in db.execute("SELECT hash FROM temp.removed")]
    if removed:
        db.execute("DELETE FROM temp.removed")
    return removed


def recount(db: sqlite3.Connection) -> None:
    """Recompute the sums that the triggers maintain."""
    for statement in _RECOUNTS:
        db.execute(statement)


# Rows


def block_proof(*values: object) -> bytes:
    """Return the checksum of a block's row."""
    return _hash("block-row-v1", values)


def agent_proof(*values: object, chain: Iterable[bytes]) -> bytes:
    """Return the checksum of an agent's row and the blocks in its chain."""
    return _hash("agent-row-v1", (*values, *sorted(set(chain))))


def verify_rows(db: sqlite3.Connection) -> None:
    """Raise IndexBrokenError unless rows match their checksums and references."""
    _require(db.execute(_NUMBERS).fetchone() == (1,), "a counter")
    _require(db.execute(_STRAYS).fetchone() == (0,), "a row without its owner")
    for width, stored, proof, *own in db.execute(_BLOCKS):
        _require(width in _WIDTHS and len(blob(stored)) % width == 0, "a block's tokens")
        values = (*own[:_BEFORE_TOKENS], packed_in(width, stored), *own[_BEFORE_TOKENS:])
        _require(block_proof(*values) == proof, "a block's row")
    agents = db.execute(
        "SELECT proof, id, key, pinned, saved, generation, namespace, tenant, name, parent, time"
        " FROM agents"
    )
    for proof, agent, *values in agents.fetchall():
        rows = db.execute("SELECT hash FROM chain WHERE agent = ?", (agent,))
        chain = [blob(row[0]) for row in rows]
        _require(agent_proof(*values, chain=chain) == proof, "an agent's row")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IndexBrokenError(f"the index is inconsistent: {what}")


def _hash(domain: str, values: Iterable[object]) -> bytes:
    return digest(domain, *map(_bytes, values))[:_PROOF_BYTES]


def _bytes(value: object) -> bytes:
    # A letter for the type comes first, since SQLite stores any type in any column.
    match value:
        case bytes():
            return b"b" + value
        case str():
            return b"t" + value.encode()
        case int():
            return b"i" + value.to_bytes(8, "little", signed=True)
        case _:
            raise IndexBrokenError(
                f"expected bytes, str or int in a row, got {type(value).__name__}"
            )


def narrow(packed: bytes) -> bytes | None:
    """Return the tokens with three bytes each; None if an id needs four bytes."""
    if any(packed[3::4]):
        return None
    narrowed = bytearray(len(packed) // 4 * 3)
    for i in range(3):
        narrowed[i::3] = packed[i::4]
    return bytes(narrowed)


def widen(narrowed: bytes) -> bytes:
    """Undo `narrow`."""
    packed = bytearray(len(narrowed) // 3 * 4)
    for i in range(3):
        packed[i::4] = narrowed[i::3]
    return bytes(packed)


def packed_in(width: object, stored: object) -> bytes:
    """Return the packed tokens in `stored`, of `width` bytes each."""
    return blob(stored) if width == TOKEN_BYTES else widen(blob(stored))


# Values


def number(db: sqlite3.Connection, name: str) -> int:
    """Return one of the numbers that the triggers maintain."""
    row = db.execute("SELECT value FROM numbers WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise IndexBrokenError(f"the index has no count of {name}")
    return whole(row[0])


def one(db: sqlite3.Connection, sql: str) -> int:
    """Return the integer that `sql` selects. Raises IndexBrokenError."""
    row = db.execute(sql).fetchone()
    if row is None:
        raise IndexBrokenError(f"expected a row in the index: {sql}")
    return whole(row[0])


def whole(value: object) -> int:
    """Return `value`. Raises IndexBrokenError unless it is an integer."""
    if not isinstance(value, int):
        raise IndexBrokenError(f"expected a whole number in the index, got {type(value).__name__}")
    return value


def blob(value: object) -> bytes:
    """Return `value`. Raises IndexBrokenError unless it is bytes."""
    if not isinstance(value, bytes):
        raise IndexBrokenError(f"expected bytes in the index, got {type(value).__name__}")
    return value
