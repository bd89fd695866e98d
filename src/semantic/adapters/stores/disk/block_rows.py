"""The index's rows of blocks.

All functions may raise IndexBrokenError. Functions that write require a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from semantic.adapters.stores.disk import schema
from semantic.adapters.stores.disk.block_file import HEADER_BYTES, layout_stamp
from semantic.adapters.stores.disk.entries import cost_of
from semantic.adapters.stores.disk.schema import (
    IndexBrokenError,
    blob,
    narrow,
    one,
    packed_in,
    whole,
    widen,
)
from semantic.adapters.stores.neighbours import Search, nearest
from semantic.domain.block_hash import (
    TOKEN_BYTES,
    BlockHash,
    BlockKey,
    BlockLink,
    Part,
    Scope,
    pack_tokens,
    unpack_tokens,
)
from semantic.domain.stored import BlockHeader, Found, Tier, left_at
from semantic.domain.value_objects import BLOCK_TOKENS

_MAX_VARIABLES = 500
"""The maximum number of values in one statement, below SQLite's limit."""

_IS_PINNED = "EXISTS (SELECT 1 FROM chain WHERE chain.hash = {hash} AND chain.pinned = 1)"
_LEAF = (
    "NOT EXISTS (SELECT 1 FROM blocks AS c WHERE c.parent = b.hash)"
    " AND (b.part != 'full'"
    " OR NOT EXISTS (SELECT 1 FROM blocks AS c WHERE c.hash = b.hash AND c.id != b.id))"
)
"""SQL condition for a block that no other block needs."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A block to evict, and the block's size in bytes."""

    key: BlockKey
    cost: int


# Finding


def file_bytes(db: sqlite3.Connection, key: BlockKey) -> int | None:
    """Return the size in bytes of the block's file; None if the block has no row."""
    row = db.execute(
        "SELECT body_bytes FROM blocks WHERE hash = ? AND part = ?", _named(key)
    ).fetchone()
    return None if row is None else HEADER_BYTES + whole(row[0])


def find(db: sqlite3.Connection, keys: Sequence[BlockKey]) -> Mapping[BlockKey, Found]:
    """Return the size and tier of the stored blocks among `keys`."""
    requested = set(keys)
    hashes = list({key.hash for key in requested})
    found = {}
    for at in range(0, len(hashes), _MAX_VARIABLES):
        some = hashes[at : at + _MAX_VARIABLES]
        places = ",".join("?" * len(some))
        sql = f"SELECT hash, part, body_bytes FROM blocks WHERE hash IN ({places})"  # noqa: S608
        for row in db.execute(sql, some):
            key = _key(row[0], row[1])
            if key in requested:
                found[key] = Found(whole(row[2]), Tier.DISK)
    return found


_HEADERS = (
    "SELECT b.hash, b.part, b.start, t.width, t.packed, s.namespace, s.tenant, s.layout"
    " FROM tokens AS t JOIN blocks AS b ON b.id = t.block JOIN scopes AS s ON s.id = b.scope"
    " WHERE t.parent = ? AND t.part = ?"
)


def children(db: sqlite3.Connection, parent: BlockHash, part: Part) -> list[BlockHeader]:
    """Return all blocks of `part` that follow `parent`."""
    rows = db.execute(f"{_HEADERS} ORDER BY b.id", (parent, part.value))
    return [_header(parent, row) for row in rows]


def roots(db: sqlite3.Connection, namespace: bytes) -> frozenset[BlockHash]:
    """Return the parent hashes of the first blocks in `namespace`."""
    rows = db.execute(
        "SELECT DISTINCT b.parent FROM scopes AS s JOIN blocks AS b ON b.scope = s.id"
        " WHERE s.namespace = ? AND b.start = 0",
        (namespace,),
    )
    return frozenset(BlockHash(blob(row[0])) for row in rows)


def nearest_children(
    db: sqlite3.Connection, parent: BlockHash, part: Part, like: Sequence[int]
) -> list[BlockHeader]:
    place = parent, part.value
    return [
        _header(parent, row)
        for packed in nearest(_narrowable(pack_tokens(like)), *_searches(db, *place))
        for row in db.execute(
            f"{_HEADERS} AND t.width = 3 AND t.packed = ?", (*place, narrow(packed))
        )
    ]


def _searches(db: sqlite3.Connection, parent: bytes, part: str) -> tuple[Search, Search]:
    # Without ids of four bytes, which no vocabulary has

    def search(condition: str, packed: bytes) -> bytes | None:
        row = db.execute(
            "SELECT packed FROM tokens WHERE parent = ? AND part = ? AND width = 3"  # noqa: S608
            f" AND packed {condition} LIMIT 1",
            (parent, part, narrow(packed)),
        ).fetchone()
        return None if row is None else widen(blob(row[0]))

    return (partial(search, "<= ? ORDER BY packed DESC"), partial(search, "> ? ORDER BY packed"))


def _narrowable(packed: bytes) -> bytes:
    """Return the packed tokens before the first id that needs four bytes."""
    wide = next((i for i, byte in enumerate(packed[3::4]) if byte), None)
    return packed if wide is None else packed[: wide * TOKEN_BYTES]


def all_sizes(db: sqlite3.Connection) -> dict[BlockKey, int]:
    """Return the size in bytes of each block's file, by the block's key."""
    rows = db.execute("SELECT hash, part, body_bytes FROM blocks")
    return {_key(row[0], row[1]): HEADER_BYTES + whole(row[2]) for row in rows}


# Inserting and deleting


def add(db: sqlite3.Connection, header: BlockHeader, body_bytes: int, used: int) -> None:
    """Insert the row of a block whose file exists."""
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
    narrowed = narrow(packed)
    width, stored = (TOKEN_BYTES, packed) if narrowed is None else (3, narrowed)
    row = (link.parent, header.part.value, width, stored, new.lastrowid)
    db.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?)", row)


def drop(db: sqlite3.Connection, key: BlockKey) -> None:
    """Delete the row of a block if it exists."""
    db.execute("DELETE FROM blocks WHERE hash = ? AND part = ?", _named(key))


# Use


def tick(db: sqlite3.Connection, n: int = 1) -> int:
    """Advance the counter of uses; return its previous value."""
    db.execute("UPDATE numbers SET value = value + ? WHERE name = 'clock'", (n,))
    return one(db, "SELECT value FROM numbers WHERE name = 'clock'") - n


def touch(db: sqlite3.Connection, keys: Sequence[BlockKey]) -> None:
    """Mark the blocks as used now, the first as the most recent."""
    last = tick(db, len(keys)) + len(keys)
    db.executemany(
        "UPDATE blocks SET used = ? WHERE hash = ? AND part = ?",
        ((last - i, *_named(key)) for i, key in enumerate(keys)),
    )


def touch_chain(db: sqlite3.Connection, hashes: Sequence[BlockHash]) -> None:
    """Mark all parts of the blocks as used now, the first as the most recent."""
    last = tick(db, len(hashes)) + len(hashes)
    db.executemany(
        "UPDATE blocks SET used = ? WHERE hash = ?",
        ((last - i, one) for i, one in enumerate(hashes)),
    )


def abandon(db: sqlite3.Connection, tenant: bytes, hashes: Iterable[BlockHash]) -> None:
    """Mark blocks for earlier eviction if no agent needs them."""
    now = tick(db, 0)
    sql = "SELECT used FROM blocks WHERE scope = ? AND pinned = 0 ORDER BY used LIMIT 1"
    firsts = (db.execute(sql, (scope,)).fetchone() for scope in _scopes(db, tenant))
    at = left_at(min((whole(row[0]) for row in firsts if row is not None), default=now), now)
    db.executemany(
        "UPDATE blocks SET used = ?2 WHERE hash = ?1 AND used > ?2"
        " AND NOT EXISTS (SELECT 1 FROM chain WHERE hash = ?1)",
        ((one, at) for one in hashes),
    )


def _scopes(db: sqlite3.Connection, tenant: bytes) -> list[int]:
    rows = db.execute("SELECT id FROM scopes WHERE tenant = ?", (tenant,)).fetchall()
    return [whole(row[0]) for row in rows]


def update_pins(db: sqlite3.Connection, hashes: Iterable[BlockHash]) -> None:
    """Recompute for the blocks whether they belong to a pinned agent."""
    db.executemany(
        f"UPDATE blocks SET pinned = {_IS_PINNED.format(hash='blocks.hash')}"  # noqa: S608
        " WHERE hash = ?",
        ((one,) for one in hashes),
    )


def update_all_pins(db: sqlite3.Connection) -> None:
    """Recompute for all blocks whether they belong to a pinned agent."""
    right = _IS_PINNED.format(hash="blocks.hash")
    db.execute(f"UPDATE blocks SET pinned = {right} WHERE pinned IS NOT {right}")  # noqa: S608


# Eviction


def lru_victim(
    db: sqlite3.Connection, tenant: bytes, spared: Sequence[BlockHash], *, pinned: bool
) -> Victim | None:
    """Return the tenant's least recently used leaf block, or None. Searches either pinned or
    unpinned blocks, except `spared`."""
    places = ",".join("?" * len(spared))
    sql = (
        "SELECT b.used, -b.start, b.hash, b.part, b.cost FROM blocks AS b"  # noqa: S608
        f" WHERE b.scope = ? AND b.pinned = ? AND b.hash NOT IN ({places}) AND {_LEAF}"
        " ORDER BY b.used, b.start DESC LIMIT 1"
    )
    found = [  # a search per scope
        db.execute(sql, (scope, int(pinned), *spared)).fetchone() for scope in _scopes(db, tenant)
    ]
    first = min((row for row in found if row is not None), default=None)
    return None if first is None else Victim(_key(first[2], first[3]), whole(first[4]))


def unneeded(db: sqlite3.Connection) -> list[Victim]:
    """Return the blocks that no agent needs, least recently used first."""
    rows = db.execute(
        "SELECT hash, part, cost FROM blocks"
        " WHERE hash NOT IN (SELECT hash FROM chain) ORDER BY used"
    )
    return [Victim(_key(row[0], row[1]), whole(row[2])) for row in rows]


def superseded(
    db: sqlite3.Connection, before: Iterable[BlockHash], links: Iterable[BlockLink]
) -> list[BlockKey]:
    """Return the partial blocks that no agent needs and whose tokens begin a longer block. Searches
    `before`, and the blocks that begin like one of `links`."""
    names = dict.fromkeys(before)
    for link in links:
        packed = _narrowable(pack_tokens(link.tokens))
        for shorter in nearest(packed, *_searches(db, link.parent, Part.FULL.value)):
            if len(shorter) < TOKEN_BYTES * len(link.tokens) and packed.startswith(shorter):
                names[link.scope.hash_of(link.parent, unpack_tokens(shorter))] = None
    keys = [BlockKey(name, Part.FULL) for name in names]
    return [key for key in keys if _is_unneeded(db, key) and _has_longer(db, key)]


def unneeded_checkpoints(db: sqlite3.Connection, hashes: Iterable[BlockHash]) -> list[BlockKey]:
    """Return the checkpoints and windows of partial blocks that no agent needs."""
    large = [name for name in dict.fromkeys(hashes) if _has_large_checkpoint(db, name)]
    keys = [BlockKey(name, part) for name in large for part in (Part.CHECKPOINT, Part.WINDOW)]
    return [key for key in keys if _is_unneeded(db, key)]


def _has_large_checkpoint(db: sqlite3.Connection, name: BlockHash) -> bool:
    row = db.execute(
        "SELECT 1 FROM blocks AS own JOIN blocks AS before ON before.hash = own.parent"
        " WHERE own.hash = ? AND own.part = ? AND before.part = ?"
        " AND own.body_bytes > before.body_bytes",
        (name, Part.CHECKPOINT.value, Part.FULL.value),
    ).fetchone()
    return row is not None


def _is_unneeded(db: sqlite3.Connection, key: BlockKey) -> bool:
    row = db.execute(
        "SELECT 1 FROM blocks WHERE hash = ? AND part = ? AND n_tokens < ?"
        " AND NOT EXISTS (SELECT 1 FROM chain WHERE chain.hash = blocks.hash)",
        (*_named(key), BLOCK_TOKENS),
    ).fetchone()
    return row is not None


def _has_longer(db: sqlite3.Connection, key: BlockKey) -> bool:
    row = db.execute(
        "SELECT t.parent, t.packed FROM blocks AS b JOIN tokens AS t ON t.block = b.id"
        " WHERE b.hash = ? AND b.part = ? AND t.width = 3",
        _named(key),
    ).fetchone()
    if row is None:
        return False
    packed = widen(blob(row[1]))
    _, above = _searches(db, blob(row[0]), key.part.value)
    longer = above(packed)
    return longer is not None and longer.startswith(packed)


# Rows


def _named(key: BlockKey) -> tuple[bytes, str]:
    return key.hash, key.part.value


def _key(name: object, part: object) -> BlockKey:
    try:
        return BlockKey(BlockHash(blob(name)), Part(str(part)))
    except ValueError as error:
        raise IndexBrokenError(str(error)) from error


def _header(parent: BlockHash, row: tuple[object, ...]) -> BlockHeader:
    # The hash is computed again, not trusted.
    name, part, start, width, stored, namespace, tenant, layout = row
    key, packed = _key(name, part), packed_in(width, stored)
    match start, packed, namespace, tenant, layout:
        case int(), bytes(), bytes(), bytes(), str() if len(packed) % 4 == 0:
            scope = Scope(namespace, tenant)
            link = BlockLink(scope, key.hash, parent, start, unpack_tokens(packed))
        case _:
            raise IndexBrokenError("a block's row has values of wrong types")
    if scope.hash_of(parent, link.tokens) != key.hash:
        raise IndexBrokenError("a block's row belongs to another block")
    return BlockHeader(link, key.part, layout)
