"""Notices: what this process lets the janitor know, and hears from it.

Of what is used all that it follows counts as used too, so what follows a block is never used later
than that. Knows not how uses and evictions are written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from semantic.adapters.stores.disk.entries import agent_key, manifest_entry
from semantic.domain.block_hash import BlockKey, Part
from semantic.domain.stored import BlockHeader, Manifest
from semantic_fleet.objects.catalog import Catalog, Tally
from semantic_fleet.objects.names import depth_of, name_of_body
from semantic_fleet.objects.objects import Objects
from semantic_fleet.objects.uses import LOG_SECONDS, Evictions, UseLog, name_of


class Notices:
    """One process's. Thread-safe; a failing object store is counted."""

    def __init__(
        self,
        objects: Objects,
        secret: bytes,
        catalog: Catalog,
        tally: Tally,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._tally = tally
        self._clock = clock
        self._uses = UseLog(objects, secret, clock=clock)
        self._evictions = Evictions(objects, secret)
        self._hearing = threading.Lock()
        self._heard: float | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def hear(self, within: float = LOG_SECONDS) -> None:
        """Forget what the janitor has deleted, unless that was heard within so many seconds: it is
        to be written again. Raises UnavailableError."""
        with self._hearing:
            if self._heard is not None and self._clock() - self._heard < within:
                return
            evicted = self._evictions.new()
            self._heard = self._clock()
        if evicted is None or evicted:
            self._catalog.drop_named(evicted)

    def record_new(self, header: BlockHeader) -> None:
        """A body is about to be stored, and what it follows is not to be evicted."""
        name = name_of_body(header.key)
        if name not in self._uses:
            self._uses.add(name, depth_of(header))
            self.record([BlockKey(header.link.parent, Part.FULL)])

    def record(self, keys: Iterable[BlockKey]) -> None:
        """Bodies are used."""
        for key in keys:
            for name, depth in self._catalog.lineage(key):
                if name in self._uses:
                    break
                self._uses.add(name, depth)
        self._write_in_time()

    def record_agent(self, manifest: Manifest) -> None:
        """An agent and all that it needs are used; it is itself evicted before any of that."""
        entry = manifest_entry(agent_key(manifest.scope, manifest.agent_id), manifest.generation)
        self._uses.add(name_of(entry.name), 2 * len(manifest.token_ids) + 2)
        links = manifest.scope.chain(manifest.token_ids)
        self.record(link.key(part) for link in links for part in Part)

    def write(self) -> None:
        """Write the log of uses now."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        with self._tally.misses("write_errors"):
            self._uses.write()

    def _write_in_time(self) -> None:
        """Write the log of uses if that is due, else when it is."""
        left = self._uses.seconds_left
        if left == 0:
            with self._tally.misses():
                self._uses.write()
        elif left is not None:
            with self._lock:
                if self._timer is None:
                    self._timer = threading.Timer(left, self.write)
                    self._timer.name, self._timer.daemon = "remote", True
                    self._timer.start()
