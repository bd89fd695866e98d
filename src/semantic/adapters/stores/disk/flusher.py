"""Brings blocks that were renamed into place onto the drive, many in one go.

Blocks' contents first, then the folders that name them; whoever points at them comes after that.
Not locked: whoever shares it between threads guards it.
"""

from __future__ import annotations

from semantic.adapters.stores.disk.counts import Counts
from semantic.adapters.stores.disk.damage import DamagedError
from semantic.adapters.stores.disk.entries import Entries
from semantic.adapters.stores.disk.names import Entry, Kind


class Flusher:
    """Remembers which blocks are not known to be on the drive."""

    def __init__(self, entries: Entries, counts: Counts) -> None:
        self._entries = entries
        self._counts = counts
        self._waiting: dict[Entry, None] = {}

    def add(self, entry: Entry) -> None:
        """The block was written just now."""
        self._waiting[entry] = None

    def flush(self) -> list[Entry]:
        """Sync all that waits. Those for which that failed are not to be believed any more.

        After a failed sync the system may say that the next one went well though nothing was
        written: it is never tried again.
        """
        waiting, self._waiting = list(self._waiting), {}
        failed = [entry for entry in waiting if not self._sync(entry)]
        lost = {shard for shard in {e.shard for e in waiting} if not self._sync_shard(shard)}
        return failed + [e for e in waiting if e.shard in lost and e not in failed]

    def _sync(self, entry: Entry) -> bool:
        try:
            self._entries.sync(entry)
        except FileNotFoundError:
            return True  # evicted since: nothing is there to be believed
        except DamagedError:
            return False
        except OSError as error:
            self._counts.add_error("write_errors", error)
            return False
        return True

    def _sync_shard(self, shard: str) -> bool:
        try:
            self._entries.sync_shard(Kind.BLOCKS, shard)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._counts.add_error("write_errors", error)
            return False
        return True
