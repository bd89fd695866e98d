"""Reading: bodies that are known to be in the object store, into memory that a request has.

What fails is a miss and is known no more: a body that is gone or damaged can be written again.
Knows not how an object is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from semantic.adapters.stores.disk.entries import DamagedError, MismatchError, NewerFormatError
from semantic.domain.stored import BlockHeader, BlockRead
from semantic_fleet.objects.bodies import THREADS, Bodies, Parallel
from semantic_fleet.objects.catalog import Catalog, Tally
from semantic_fleet.objects.names import has_tail
from semantic_fleet.objects.notices import Notices
from semantic_fleet.objects.objects import UnavailableError

T = TypeVar("T")

_HEARD = 1.0
"""Seconds within which several bodies that are gone let the janitor be heard once."""


class Reader:
    """Reads bodies for one process. Thread-safe."""

    def __init__(self, bodies: Bodies, catalog: Catalog, notices: Notices, tally: Tally) -> None:
        self._bodies = bodies
        self._catalog = catalog
        self._notices = notices
        self._tally = tally
        self._threads = Parallel()

    def read_into(self, reads: Sequence[BlockRead]) -> Sequence[bool]:
        ahead = max(1, THREADS // max(1, len(reads)))
        return self._threads.each(partial(self._read_into, ahead), reads)

    def read(self, header: BlockHeader) -> bytes | None:
        return self._verified(header, lambda: self._body(header))

    def close(self) -> None:
        self._threads.close()

    def _read_into(self, ahead: int, read: BlockRead) -> bool:
        segments = read.segments

        def fill() -> bool:
            n_bytes = sum(map(len, segments))
            _scatter(self._bodies.read(read.header, n_bytes, ahead), segments)
            return True

        return self._verified(read.header, fill) is not None

    def _body(self, header: BlockHeader) -> bytes:
        known = self._catalog.n_bytes(header.key)
        n_bytes = self._bodies.size(header) if known is None else known
        return b"".join(map(bytes, self._bodies.read(header, n_bytes, THREADS)))

    def _verified(self, header: BlockHeader, read: Callable[[], T]) -> T | None:
        """What `read` returns of a verified body; None when it fails, with the reason counted."""
        if self._catalog.is_forgotten(header.key):
            self._tally.count("misses")
            return None
        try:
            found = read()
        except FileNotFoundError:
            self._is_gone(header)
        except DamagedError as damage:
            self._discard(header, damage.kind)
        except NewerFormatError:
            self._tally.count("newer format")
        except MismatchError as error:
            # With the name of a header that is in itself sound, the object is at fault.
            link = header.link
            if str(error) == "header" and link.hash == link.scope.hash_of(link.parent, link.tokens):
                self._discard(header, "identity")
            else:
                self._tally.count("mismatches", str(error))
            if str(error) == "size":  # as it was known, or as it is asked for
                self._catalog.drop([header.key])
        except UnavailableError:
            self._tally.count("unavailable")
        else:
            self._tally.count("hits")
            return found
        self._tally.count("misses")
        return None

    def _is_gone(self, header: BlockHeader) -> None:
        """It was evicted, and most likely what follows it too: that is to be written again with
        it, by the request that misses it."""
        self._catalog.drop([header.key])
        if has_tail(header):
            with self._tally.misses("write_errors"):
                self._bodies.delete_tail(header.link.scope, header.key, header.link.parent)
        with self._tally.misses():
            self._notices.hear(_HEARD)

    def _discard(self, header: BlockHeader, damage: str) -> None:
        """Delete a damaged object: what is not there can be written again."""
        self._tally.count("damaged", f"damaged: {damage}")
        tail_of = header.link.parent if has_tail(header) else None
        with self._tally.misses("write_errors"):
            self._bodies.delete(header.link.scope, header.key, tail_of)
        self._catalog.drop([header.key])


def _scatter(pieces: Iterable[memoryview], segments: Sequence[memoryview]) -> None:
    """Copy consecutive pieces into consecutive segments of the same bytes in total."""
    waiting = iter(segments)
    room = memoryview(b"")
    for piece in pieces:
        rest = piece
        while rest:
            room = room or next(waiting)
            n = min(len(rest), len(room))
            room[:n] = rest[:n]
            room, rest = room[n:], rest[n:]
