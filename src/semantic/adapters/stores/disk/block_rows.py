"""What the index knows about blocks: which there are, what follows what, what was used when.

Functions on an open connection; those that change something belong into a transaction. Knows no
files. A row that cannot be right raises IndexBrokenError.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from semantic.adapters.stores.disk import schema
from semantic.adapters.stores.disk.block_file import HEADER_BYTES, layout_stamp
from semantic.adapters.stores.disk.entries import cost_of
from semantic.adapters.stores.disk.schema import IndexBrokenError, blob, one, whole
from semantic.domain.block_hash import (
    HEAD_TOKENS,
    TOKEN_BYTES,
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    pack_tokens,
    unpack_tokens,
)
from semantic.domain.stored import BlockHeader, Found, Tier
from semantic.domain.value_objects import BLOCK_TOKENS

_MOST_VARIABLES = 500
"""SQLite takes a limited number of values in one statement."""

_IS_PINNED = (
    "EXISTS (SELECT 1 FROM chain JOIN agents ON agents.id = chain.agent"
    " WHERE chain.hash = {hash} AND agents.pinned)"
)
_LEAF = (
    "NOT EXISTS (SELECT 1 FROM blocks AS c WHERE c.parent = b.hash)"
    " AND (b.part != 'full'"
    " OR NOT EXISTS (SELECT 1 FROM blocks AS c WHERE c.hash = b.hash AND c.id != b.id))"
)
"""Nothing that is there needs `b`: no block follows it, and its own other parts are gone."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A block that may go, and what that gains."""

    key: BlockKey
    cost: int


# Finding


def file_bytes(db: sqlite3.Connection, key: BlockKey) -> int | None:
    """Size of the block's file; None when it is not known."""
    row = db.execute(
        "SELECT body_bytes FROM blocks WHERE hash = ? AND part = ?", _named(key)
    ).fetchone()
    return None if row is None else HEADER_BYTES + whole(row[0])


def find(db: sqlite3.Connection, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
    """Those of `keys` that are known."""
    wanted = set(keys)
    hashes = list({key.hash for key in wanted})
    found = {}
    for at in range(0, len(hashes), _MOST_VARIABLES):
        some = hashes[at : at + _MOST_VARIABLES]
        places = ",".join("?" * len(some))
        sql = f"SELECT hash, part, body_bytes FROM blocks WHERE hash IN ({places})"  # noqa: S608
        for row in db.execute(sql, some):
            key = _key(row[0], row[1])
            if key in wanted:
                found[key] = Found(whole(row[2]), Tier.DISK)
    return found


def children(
    db: sqlite3.Connection, parent: BlockHash, part: Part, like: Sequence[int] | None = None
) -> list[BlockHeader]:
    """The blocks of `part` that follow `parent`, and begin like `like` if that is given."""
    head = None if like is None else pack_tokens(like[:HEAD_TOKENS])
    rows = db.execute(
        "SELECT b.hash, b.part, b.start, t.packed, s.namespace, s.tenant, s.layout"
        " FROM blocks AS b JOIN tokens AS t ON t.block = b.id JOIN scopes AS s ON s.id = b.scope"
        " WHERE b.parent = ?1 AND b.part = ?2 AND (?3 IS NULL"
        " OR length(?3) AND substr(t.packed, 1, min(length(?3), ?4))"
        " = substr(?3, 1, min(length(t.packed), ?4)))"
        " ORDER BY b.id",
        (parent, part.value, head, HEAD_TOKENS * TOKEN_BYTES),
    )
    return [_header(parent, row) for row in rows]


def all_sizes(db: sqlite3.Connection) -> dict[BlockKey, int]:
    """Size of the file of every block."""
    rows = db.execute("SELECT hash, part, body_bytes FROM blocks")
    return {_key(row[0], row[1]): HEADER_BYTES + whole(row[2]) for row in rows}


# Coming and going


def add(db: sqlite3.Connection, header: BlockHeader, body_bytes: int, used: int) -> None:
    """Remember a block whose file is in place."""
    link = header.link
    scope = (link.scope.namespace, link.scope.tenant, layout_stamp(header.layout))
    db.execute("INSERT OR IGNORE INTO scopes(namespace, tenant, layout) VALUES (?, ?, ?)", scope)
    sql = (
        "INSERT INTO blocks(hash, part, parent, scope, start, n_tokens, body_bytes, cost, used,"  # noqa: S608
        " pinned, proof)"
        f" SELECT ?1, ?2, ?3, id, ?4, ?5, ?6, ?7, ?8, {_IS_PINNED.format(hash='?1')}, ?9"
        " FROM scopes WHERE namespace = ?10 AND tenant = ?11 AND layout = ?12"
    )
    packed = pack_tokens(link.tokens)
    own = (link.hash, header.part.value, link.parent)
    numbers = (link.start, len(link.tokens), body_bytes)
    proof = schema.block_proof(*own, *numbers, packed, *scope)
    cost = cost_of(HEADER_BYTES + body_bytes)
    new = db.execute(sql, (*own, *numbers, cost, used, proof, *scope))
    db.execute("INSERT INTO tokens VALUES (?, ?)", (new.lastrowid, packed))


def drop(db: sqlite3.Connection, key: BlockKey) -> None:
    """Forget a block, if it is known."""
    db.execute("DELETE FROM blocks WHERE hash = ? AND part = ?", _named(key))


# Use


def tick(db: sqlite3.Connection, n: int = 1) -> int:
    """The counter of uses before the `n` new readings."""
    db.execute("UPDATE numbers SET value = value + ? WHERE name = 'clock'", (n,))
    return one(db, "SELECT value FROM numbers WHERE name = 'clock'") - n


def touch(db: sqlite3.Connection, keys: Sequence[BlockKey]) -> None:
    """All of `keys` were used now, the first the most."""
    last = tick(db, len(keys)) + len(keys)
    db.executemany(
        "UPDATE blocks SET used = ? WHERE hash = ? AND part = ?",
        ((last - i, *_named(key)) for i, key in enumerate(keys)),
    )


def touch_chain(db: sqlite3.Connection, hashes: Sequence[BlockHash]) -> None:
    """All parts of a chain's blocks were used now, the first the most."""
    last = tick(db, len(hashes)) + len(hashes)
    db.executemany(
        "UPDATE blocks SET used = ? WHERE hash = ?",
        ((last - i, one) for i, one in enumerate(hashes)),
    )


def update_pins(db: sqlite3.Connection, hashes: Iterable[BlockHash]) -> None:
    """Derive anew which of `hashes` belong to a pinned agent."""
    db.executemany(
        f"UPDATE blocks SET pinned = {_IS_PINNED.format(hash='blocks.hash')}"  # noqa: S608
        " WHERE hash = ?",
        ((one,) for one in hashes),
    )


def update_all_pins(db: sqlite3.Connection) -> None:
    """Derive anew which blocks belong to a pinned agent."""
    right = _IS_PINNED.format(hash="blocks.hash")
    db.execute(f"UPDATE blocks SET pinned = {right} WHERE pinned IS NOT {right}")  # noqa: S608


# What may go


def next_victim(db: sqlite3.Connection, spared: Sequence[BlockHash]) -> Victim | None:
    """What was used longest ago of all that nothing else needs; None when there is no such."""
    places = ",".join("?" * len(spared))
    row = db.execute(
        "SELECT b.hash, b.part, b.cost FROM blocks AS b"  # noqa: S608
        f" WHERE NOT b.pinned AND b.hash NOT IN ({places}) AND {_LEAF}"
        " ORDER BY b.pinned, b.used, b.start DESC LIMIT 1",
        tuple(spared),
    ).fetchone()
    return None if row is None else Victim(_key(row[0], row[1]), whole(row[2]))


def unneeded(db: sqlite3.Connection) -> list[Victim]:
    """All blocks that belong to no agent."""
    rows = db.execute(
        "SELECT hash, part, cost FROM blocks"
        " WHERE hash NOT IN (SELECT hash FROM chain) ORDER BY used"
    )
    return [Victim(_key(row[0], row[1]), whole(row[2])) for row in rows]


def superseded(db: sqlite3.Connection, parents: Iterable[BlockHash]) -> list[BlockKey]:
    """FULL tails behind `parents` that no agent needs and a longer block begins with."""
    found = []
    for parent in parents:
        rows = db.execute(
            "SELECT b.hash, t.packed, b.hash IN (SELECT hash FROM chain)"
            " FROM blocks AS b JOIN tokens AS t ON t.block = b.id"
            " WHERE b.parent = ? AND b.part = 'full'",
            (parent,),
        ).fetchall()
        tokens = [blob(row[1]) for row in rows]
        for name, packed, is_needed in rows:
            if is_needed or len(packed) >= 4 * BLOCK_TOKENS:
                continue
            if any(len(one) > len(packed) and one.startswith(packed) for one in tokens):
                found.append(_key(name, Part.FULL.value))
    return found


# Rows


def _named(key: BlockKey) -> tuple[bytes, str]:
    return key.hash, key.part.value


def _key(name: object, part: object) -> BlockKey:
    try:
        return BlockKey(BlockHash(blob(name)), Part(str(part)))
    except ValueError as error:
        raise IndexBrokenError(str(error)) from error


def _header(parent: BlockHash, row: tuple[object, ...]) -> BlockHeader:
    """A row as a header; its hash is recomputed, for the index itself proves nothing."""
    name, part, start, packed, namespace, tenant, layout = row
    key = _key(name, part)
    match start, packed, namespace, tenant, layout:
        case int(), bytes(), bytes(), bytes(), str() if len(packed) % 4 == 0:
            scope = Scope(namespace, tenant)
            link = BlockLink(scope, key.hash, parent, start, unpack_tokens(packed))
        case _:
            raise IndexBrokenError("a block's row is no block")
    if scope.hash_of(parent, link.tokens) != key.hash:
        raise IndexBrokenError("a block's row belongs to another block")
    return BlockHeader(link, key.part, layout)
