"""Lazy lists of a store's agents, page by page: no list of all is made.

Knows the store's port; not what is done with the manifests.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from semantic.domain.block_hash import Scope
from semantic.domain.stored import Manifest, Place
from semantic.ports.store import CacheStorePort

_PAGE = 64


def walk(
    store: CacheStorePort, scope: Scope, page: int = _PAGE, after: Place | None = None
) -> Iterator[Manifest]:
    """A scope's manifests, newest first: those that come after `after`, read `page` at a time."""
    while found := store.page(scope, page, after):
        yield from found
        if len(found) < page:
            return
        after = found[-1].place


def newest_first(store: CacheStorePort) -> Iterator[Manifest]:
    """The manifests of all scopes, newest first."""
    of_scopes = [walk(store, scope) for scope in store.scopes()]
    return heapq.merge(*of_scopes, key=lambda one: one.place, reverse=True)
