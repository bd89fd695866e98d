"""BlockSaver: saves a sequence's blocks in a block store, and drops damaged blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from semantic.application.cache.loading import NEVER_GIVEN_UP, Load, Terms
from semantic.application.cache.prefix_lookup import StoredPrefix, window_links
from semantic.domain.block_hash import BlockKey, BlockLink, Part, Scope
from semantic.domain.errors import BackendError, CacheReconstructionError
from semantic.domain.stored import BlockHeader, Body, StoredBlock
from semantic.domain.value_objects import BLOCK_TOKENS, SequenceId
from semantic.ports.generation import BatchBackend
from semantic.ports.store import CacheStorePort


@dataclass(slots=True)
class RequestState:
    """The prefix store's state of one request."""

    links: list[BlockLink] = field(default_factory=list)
    """The hash chain of the request's full blocks so far."""
    stored_blocks: int = 0
    """The number of first blocks that the store has or refused."""
    prefix: StoredPrefix | None = None
    """The stored prefix to restore when the request opens."""
    searched: bool = False
    """True if `prefix` was looked up during this wait."""
    terms: Terms = NEVER_GIVEN_UP
    """The conditions for reading `prefix`."""
    preferred: int = 0
    """The number of first tokens that the request computes because reading is slower."""
    load: Load | None = None
    """The running load into the request's sequence."""
    put: list[BlockKey] = field(default_factory=list)
    """Keys of bodies that the request saved."""
    read: list[BlockHeader] = field(default_factory=list)
    """Headers of bodies that the request read."""
    scope: Scope | None = None
    """The scope of the request's block hashes."""
    is_ahead: bool = False
    """True if a thread reads `prefix` ahead, which may change the tiers of its bodies."""
    unread: int = 0
    """The length in tokens of a prefix that the store could not read."""
    is_unproven: bool = False
    """True if the store may lack some of the first `stored_blocks`, as they came from the pool."""

    def full_links(self, scope: Scope, tokens: Sequence[int]) -> list[BlockLink]:
        """Return the links of the full blocks of `tokens`."""
        n_full = len(tokens) // BLOCK_TOKENS
        if len(self.links) < n_full:
            self.links = scope.continued(self.links, tokens[: n_full * BLOCK_TOKENS])
        return self.links[:n_full]

    def all_links(self, scope: Scope, tokens: Sequence[int]) -> list[BlockLink]:
        """Return the links of all blocks of `tokens`, including a partial last block."""
        return scope.continued(self.full_links(scope, tokens), tokens)


@dataclass(frozen=True, slots=True)
class Export:
    """The part of an open sequence to save. `interim` is False at a turn's end."""

    sequence: SequenceId
    put: list[BlockKey]
    interim: bool


class BlockSaver:
    """Stores the blocks of one model's sequences."""

    def __init__(self, model: BatchBackend, store: CacheStorePort) -> None:
        self._model = model
        self._layout = model.layout()
        self._store = store
        self.has_gaps = False  # True if interim blocks may be missing on disk

    def put_full(self, export: Export, links: Sequence[BlockLink]) -> bool:
        """Save the FULL bodies of `links`. Returns False once the store refuses a body."""
        self.has_gaps |= self._store.holds_back
        lacking = self._store.lacking([link.key(Part.FULL) for link in links])
        return all(
            self._put(export, link, Part.FULL) for link in links if link.key(Part.FULL) in lacking
        )

    def put_checkpoint(self, export: Export, links: Sequence[BlockLink]) -> None:
        """Save the bodies needed to resume a sequence after `links`."""
        if not self._layout.needs_checkpoint or not links:
            return
        window = window_links(self._layout, links)
        last = BlockHeader(links[-1], Part.CHECKPOINT, self._layout.name)
        lacking = self._store.lacking([last.key, *(link.key(Part.WINDOW) for link in window)])
        missing = [link for link in window if link.key(Part.WINDOW) in lacking]
        done = all(self._put(export, link, Part.WINDOW) for link in missing)
        if done and last.key in lacking:
            self._put_body(export, last, self._model.export_checkpoint(export.sequence))

    def drop(
        self, put: Sequence[BlockKey], links: Iterable[BlockLink], read: Iterable[BlockHeader]
    ) -> None:
        """Drop the bodies `put`, and bodies with NaN or infinite values. Also drops all blocks
        after them."""
        headers = [BlockHeader(link, Part.FULL, self._layout.name) for link in links]
        others = {one.key: one for one in (*headers, *read)}
        for key in put:
            others.pop(key, None)
        found = self._store.find(list(others))
        bad = [key for key in found if not self._is_finite(others[key])]
        self._store.drop(self._with_dependents([*put, *bad]))

    def _put(self, export: Export, link: BlockLink, part: Part) -> bool:
        body = self._model.export_block(export.sequence, part, link.start, link.stop)
        return self._put_body(export, BlockHeader(link, part, self._layout.name), body)

    def _put_body(self, export: Export, header: BlockHeader, body: Body) -> bool:
        export.put.append(header.key)
        return self._store.put(StoredBlock(header, body, export.interim))

    def _is_finite(self, header: BlockHeader) -> bool:
        # True for an unreadable body
        body = self._store.read(header)
        try:
            return body is None or self._model.is_finite(header.part, body)
        except (BackendError, CacheReconstructionError):
            return False

    def _with_dependents(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        found = dict.fromkeys(keys)
        waiting = list(found)
        while waiting:
            key = waiting.pop()
            if key.part is not Part.FULL:
                continue
            for part in Part:
                after = [one.key for one in self._store.children(key.hash, part)]
                waiting += (one for one in after if one not in found)
                found.update(dict.fromkeys([BlockKey(key.hash, part), *after]))
        return list(found)
