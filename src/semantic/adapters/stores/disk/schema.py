"""The tables of the index. The index can be lost: all of it follows from the files.

`blocks.used` and `agents.saved` are readings of a counter that grows with each use; no clock.
`proof` is a hash of what must not change in a row. `agents.generation` is of the manifest that the
agent's chain follows from, `manifests.frame` what its file begins with.
Triggers keep the sum of all costs, so that the budget is checked without adding up a folder.
"""

from __future__ import annotations

import sqlite3

VERSION = 2

_COSTLY = ("blocks", "manifests", "reservations", "others")

_TABLES = """
CREATE TABLE numbers(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE scopes(
    id INTEGER PRIMARY KEY, namespace BLOB NOT NULL, tenant BLOB NOT NULL, layout TEXT NOT NULL,
    UNIQUE (namespace, tenant, layout));
CREATE TABLE blocks(
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL, part TEXT NOT NULL, parent BLOB NOT NULL,
    scope INTEGER NOT NULL, start INTEGER NOT NULL, n_tokens INTEGER NOT NULL,
    body_bytes INTEGER NOT NULL, cost INTEGER NOT NULL, used INTEGER NOT NULL,
    pinned INTEGER NOT NULL, proof BLOB NOT NULL, UNIQUE (hash, part));
CREATE INDEX blocks_by_parent ON blocks(parent);
CREATE INDEX blocks_by_use ON blocks(pinned, used, start DESC);
CREATE TABLE tokens(block INTEGER PRIMARY KEY, packed BLOB NOT NULL);
CREATE TRIGGER tokens_go AFTER DELETE ON blocks
    BEGIN DELETE FROM tokens WHERE block = old.id; END;
CREATE TABLE agents(
    id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, pinned INTEGER NOT NULL,
    saved INTEGER NOT NULL, generation INTEGER NOT NULL, proof BLOB NOT NULL);
CREATE TABLE manifests(
    agent INTEGER NOT NULL, generation INTEGER NOT NULL, cost INTEGER NOT NULL,
    frame BLOB NOT NULL, PRIMARY KEY (agent, generation)) WITHOUT ROWID;
CREATE TABLE chain(agent INTEGER NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (agent, hash))
    WITHOUT ROWID;
CREATE INDEX chain_by_hash ON chain(hash);
CREATE TABLE reservations(id INTEGER PRIMARY KEY, session TEXT NOT NULL, cost INTEGER NOT NULL);
CREATE TABLE others(name TEXT PRIMARY KEY, cost INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE shards(name TEXT PRIMARY KEY) WITHOUT ROWID;
INSERT INTO numbers VALUES ('bytes', 0), ('clock', 0);
"""

_SUM_TRIGGERS = """
CREATE TRIGGER {table}_come AFTER INSERT ON {table}
    BEGIN UPDATE numbers SET value = value + new.cost WHERE name = 'bytes'; END;
CREATE TRIGGER {table}_go AFTER DELETE ON {table}
    BEGIN UPDATE numbers SET value = value - old.cost WHERE name = 'bytes'; END;
"""

SCRIPT = _TABLES + "".join(_SUM_TRIGGERS.format(table=table) for table in _COSTLY)
RECOUNT = """
UPDATE numbers SET value = (
    SELECT (SELECT coalesce(sum(cost), 0) FROM blocks)
        + (SELECT coalesce(sum(cost), 0) FROM manifests)
        + (SELECT coalesce(sum(cost), 0) FROM reservations)
        + (SELECT coalesce(sum(cost), 0) FROM others))
WHERE name = 'bytes'
"""
"""What the triggers keep, added up anew."""


def create(db: sqlite3.Connection) -> None:
    """Make the tables in an empty database. Belongs into a transaction: all or none."""
    statement = ""
    for line in SCRIPT.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement)
            statement = ""
    db.execute(f"PRAGMA user_version = {VERSION}")


def is_sound(db: sqlite3.Connection) -> bool:
    """Whether the tables are ours and SQLite finds no fault in how they are stored."""
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
