"""The names of agents in a store that is not opened: soon, without a lock, or not at all.

For completions in a shell. Repairs nothing, so that names may be old. Knows the index's table of
agents and the secret.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from semantic.adapters.stores.disk.folder import SECRET_BYTES
from semantic.domain.block_hash import LOCAL_TENANT, tenant_tag
from semantic.domain.stored import packed_name

_WAIT_SECONDS = 0.1
_MOST_STEPS = 3_000_000
"""Of SQLite's machine: some hundred thousand agents."""
_NAMES = """
SELECT name FROM agents WHERE tenant = ?1 AND substr(name, 1, length(?2)) = ?2
GROUP BY name ORDER BY max(time) DESC LIMIT ?3
"""


def agent_names(root: Path, beginning: str, limit: int) -> list[str]:
    """At most `limit` names that begin so, of agents of requests without a key, last saved first.

    Empty for a store that is missing, damaged, of another format or locked, and for one with more
    agents than can be looked at.
    """
    try:
        secret = _read_secret(root / "secret")
        with closing(_opened(root.absolute() / "index.sqlite")) as db:
            db.execute("PRAGMA trusted_schema = OFF")
            db.set_progress_handler(lambda: 1, _MOST_STEPS)
            wanted = (tenant_tag(secret, LOCAL_TENANT), packed_name(beginning), limit)
            rows = db.execute(_NAMES, wanted).fetchall()
    except (OSError, sqlite3.Error):
        return []
    packed = (name for (name,) in rows if isinstance(name, bytes))
    return [name.decode("utf-8", "replace") for name in packed]


def _opened(index: Path) -> sqlite3.Connection:
    """Without a log the file is whole, and as immutable SQLite makes no files beside it."""
    logged = index.with_name(f"{index.name}-wal").exists()
    address = f"file:{quote(str(index))}?{'mode=ro' if logged else 'immutable=1'}"
    return sqlite3.connect(address, uri=True, timeout=_WAIT_SECONDS)


def _read_secret(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SECRET_BYTES)
