"""The engine's side of the store: what requests begin with, and what is kept of them.

Looks prefixes up, loads them beside the running batch, exports what is new, writes manifests.
Knows tokens, hashes and the ports; not when a request runs nor how many blocks the pool has.
Whatever goes wrong here costs time: the request is computed as if there were no store.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from semantic.application.cache.break_even import BreakEven
from semantic.application.cache.loading import Load, Loader
from semantic.application.cache.match_report import match_report
from semantic.application.cache.prefix_lookup import PrefixLookup, StoredPrefix, window_links
from semantic.application.request import Request
from semantic.domain.block_hash import (
    PUBLIC_TENANT,
    BlockHash,
    BlockLink,
    Part,
    Scope,
    namespace_of,
    tenant_tag,
)
from semantic.domain.match import MatchEnd
from semantic.domain.prefix import common_prefix
from semantic.domain.stored import BlockHeader, Manifest, StoredBlock, Tier
from semantic.domain.value_objects import BLOCK_TOKENS, SequenceId
from semantic.ports.outbound import BatchBackend
from semantic.ports.store import CacheStorePort


class PrefixStore:
    """Keeps what requests compute, and gives it to those that begin alike.

    Used by the stepping thread, under the engine's lock where requests change hands.
    """

    def __init__(
        self,
        model: BatchBackend,
        store: CacheStorePort,
        *,
        prefill_rate: Callable[[], float | None],
        model_name: str = "",
        now: Callable[[], float] = time.time,
    ) -> None:
        """`now` gives seconds since 1970, for people to read; nothing is decided by it."""
        self._model = model
        self._layout = model.layout()
        self._store = store
        self._finder = PrefixLookup(store, self._layout)
        self._loader = Loader(model, store)
        self.break_even = BreakEven(prefill_rate)
        self._namespace = namespace_of(model.model_id, self._layout.name)
        self._model_name = model_name
        self._now = now
        self._scopes: dict[str, Scope] = {}
        self._in_flight: dict[BlockHash, str] = {}
        self._public: list[tuple[int, ...]] = []
        self.restored_bytes: Counter[Tier] = Counter()  # read whole, since the start

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a sequence can be begun at any token, also before the last one it held.

        A request that comes back must run its last token again; where checkpoints are needed, one
        taken after that token is of no use to it.
        """
        return not self._layout.needs_checkpoint

    # Agents

    def scope(self, tenant: str) -> Scope:
        """Within which the blocks of `tenant` are shared."""
        if tenant not in self._scopes:
            tag = tenant_tag(self._store.secret, tenant)
            self._scopes[tenant] = Scope(self._namespace, tag)
        return self._scopes[tenant]

    def open_to_all(self, tokens: Sequence[int]) -> None:
        """Let every tenant begin with what PUBLIC_TENANT has of `tokens`."""
        self._public.append(tuple(tokens))

    def manifest(self, agent_id: str, tenant: str) -> Manifest | None:
        """The agent as it was saved last."""
        return self._store.manifest(self.scope(tenant), agent_id)

    def fork(self, manifest: Manifest, new_agent_id: str) -> None:
        """Save `manifest` in another agent's name; its blocks are shared."""
        forked = replace(manifest, agent_id=new_agent_id, parent=manifest.agent_id, pinned=False)
        self._store.save(replace(forked, generation=0, saved_at=self._now()))

    def forget(self, agent_id: str, tenant: str) -> bool:
        """Forget what was saved of the agent; its blocks stay until room is needed."""
        return self._store.remove(self.scope(tenant), agent_id)

    # Beginning with what is there

    def find(self, request: Request) -> StoredPrefix | None:
        """What the store has of a waiting request's tokens; looked for once while it waits."""
        state = request.archived
        if not state.searched:
            state.searched = True
            state.prefix = self._worthwhile(self._search(request, start=0), request)
            self._note_junction(request)
            if state.prefix is not None and not state.prefix.length:
                state.prefix = None  # others have its blocks, and there is nowhere to begin
        return state.prefix

    def begin(self, request: Request, prefix: StoredPrefix) -> Load | None:
        """Let `prefix` be read into the request's sequence. Raises BackendError."""
        if request.sequence is None:
            raise AssertionError("only an opened request is loaded")
        self.release(request)  # what is read is not computed: nobody has to wait for it
        request.archived.prefix = None
        load = self._loader.begin(prefix, request.sequence)
        request.archived.load = load
        return load

    def next_blocks(self, request: Request) -> StoredPrefix | None:
        """What others have computed meanwhile of what `request` has to compute next."""
        if self._layout.needs_checkpoint or request.computed % BLOCK_TOKENS:
            return None
        if request.archived.end is MatchEnd.DAMAGED:
            return None  # what could not be read just now would be found again
        return self._worthwhile(self._search(request, start=request.computed), request)

    def finish_load(self, request: Request) -> None:
        """The request's load is done: it holds what was proven. Raises BackendError."""
        state = request.archived
        load, state.load = state.load, None
        if load is None:
            return
        loaded = self._loader.finish(load)
        self.break_even.observe(loaded.disk_bytes, loaded.seconds)
        request.computed = loaded.length
        request.cached_tokens += loaded.length - load.prefix.start
        request.cached_tokens = min(request.cached_tokens, len(request.prompt) - 1)
        # What is everybody's is no part of the agent's own chain: that is kept whole.
        state.kept_blocks = 0 if load.prefix.is_public else loaded.length // BLOCK_TOKENS
        state.end = loaded.end
        if loaded.length > load.prefix.start:
            if loaded.end is not MatchEnd.DAMAGED:
                self.restored_bytes.update({t: load.prefix.bytes_in(t) for t in Tier})
            state.source = load.prefix.source.value
            self._store.touch([header.key for header in load.prefix.headers])

    def wait(self, loads: Iterable[Load], seconds: float) -> None:
        """Return when one of `loads` is done, or after `seconds`."""
        self._loader.wait(loads, seconds)

    # Computing once for several

    def claim(self, request: Request) -> bool:
        """Whether `request` may compute its next block; False while another one is at it.

        Who is told yes computes it for all: the others find it in the store when it is done. Who
        is in the middle of a block goes on with it in any case.
        """
        self.release(request)
        number = request.computed // BLOCK_TOKENS
        links = request.archived.full_links(self.scope(request.tenant), request.tokens[:-1])
        if self._layout.needs_checkpoint or number >= len(links):
            return True
        wanted = links[number].hash
        if self._in_flight.setdefault(wanted, request.uid) == request.uid:
            request.archived.computing = wanted
            return True
        return request.computed % BLOCK_TOKENS != 0

    def release(self, request: Request) -> None:
        """`request` computes no block any more that others may wait for."""
        computing, request.archived.computing = request.archived.computing, None
        if computing is not None and self._in_flight.get(computing) == request.uid:
            del self._in_flight[computing]

    # Keeping

    def publish(self, request: Request) -> None:
        """Keep the blocks that prefill has completed, so that others need not compute them."""
        sequence, state = request.sequence, request.archived
        whole = request.computed // BLOCK_TOKENS
        if sequence is None:
            return
        links = state.full_links(self.scope(request.tenant), request.tokens)
        if whole > state.kept_blocks:
            self._put_full(sequence, links[state.kept_blocks : whole])
            state.kept_blocks = whole
        if request.computed == state.junction:
            self._put_way_on(sequence, links[:whole])

    def keep_blocks(self, request: Request) -> int:
        """Keep all that an open, not decoding sequence holds; how many tokens that is."""
        sequence, state = request.sequence, request.archived
        if sequence is None:
            return 0
        length = self._model.length(sequence)
        links = state.all_links(self.scope(request.tenant), request.tokens[:length])
        if self._put_full(sequence, links[state.kept_blocks :]):
            self._put_way_on(sequence, links)
        return length

    def keep_turn(self, request: Request, length: int) -> None:
        """Save the agent as it is after the turn that `request` was."""
        # Read again: it may have been pinned while the request ran.
        before = self.manifest(request.agent_id, request.tenant)
        self._store.save(
            Manifest(
                self.scope(request.tenant),
                request.agent_id,
                request.tokens[:length],
                pinned=before is not None and before.pinned,
                parent=None if before is None else before.parent,
                prompt_tokens=len(request.prompt),
                note=request.note,
                model=self._model_name,
                saved_at=self._now(),
                match=match_report(request),
            )
        )

    # Life

    def flush(self) -> None:
        """Return when all that was kept is as safe as the store can make it."""
        self._store.flush()

    def close(self, *, keep_store: bool = False) -> None:
        """End the reading threads and, unless somebody else goes on with it, the store."""
        self._loader.close()
        if not keep_store:
            self._store.close()

    # Inside

    def _search(self, request: Request, start: int) -> StoredPrefix | None:
        tokens = request.tokens[:-1]  # the last one must run to give the logits of the next
        scope = self.scope(request.tenant)
        links = request.archived.full_links(scope, tokens)
        prefix = self._finder.find(scope, links, tokens, start)
        state = request.archived
        if prefix is not None:
            state.end = prefix.end
            state.kept_blocks = max(state.kept_blocks, prefix.known // BLOCK_TOKENS)
        public = None if start else self._search_public(tokens)
        if public is None or (prefix is not None and prefix.length >= public.length):
            return prefix
        state.end = public.end
        return public

    def _search_public(self, tokens: Sequence[int]) -> StoredPrefix | None:
        """What there is for everybody of the beginning of `tokens`."""
        length = max((common_prefix(one, tokens) for one in self._public), default=0)
        if not length:
            return None
        scope, begins = self.scope(PUBLIC_TENANT), tokens[:length]
        links = [link for link in scope.chain(begins) if link.is_full]
        found = self._finder.find(scope, links, begins)
        return None if found is None else replace(found, is_public=True)

    def _worthwhile(self, prefix: StoredPrefix | None, request: Request) -> StoredPrefix | None:
        """`prefix`, unless computing it is faster than reading it."""
        if prefix is None:
            return None
        n_tokens = prefix.length - prefix.start
        if self.break_even.worth_reading(prefix.bytes_in(Tier.DISK), n_tokens):
            return prefix
        request.archived.end = MatchEnd.SLOWER
        return None

    def _note_junction(self, request: Request) -> None:
        """Others have more of these tokens than can be begun with: take a checkpoint there."""
        prefix = request.archived.prefix
        if self._layout.needs_checkpoint and prefix is not None and prefix.known > prefix.length:
            request.archived.junction = prefix.known

    def _put_full(self, sequence: SequenceId, links: Sequence[BlockLink]) -> bool:
        """Keep these blocks' FULL bodies; False when one was refused: no later one is of use."""
        lacking = self._store.lacking([link.key(Part.FULL) for link in links])
        return all(
            self._put(sequence, link, Part.FULL) for link in links if link.key(Part.FULL) in lacking
        )

    def _put_way_on(self, sequence: SequenceId, links: Sequence[BlockLink]) -> None:
        """Keep what is needed to go on after `links`: the window, and a checkpoint."""
        if not self._layout.needs_checkpoint or not links:
            return
        window = window_links(self._layout, links)
        last = BlockHeader(links[-1], Part.CHECKPOINT, self._layout.name)
        lacking = self._store.lacking([last.key, *(link.key(Part.WINDOW) for link in window)])
        for link in window:
            if link.key(Part.WINDOW) in lacking and not self._put(sequence, link, Part.WINDOW):
                return
        if last.key in lacking:
            self._store.put(StoredBlock(last, self._model.export_checkpoint(sequence)))

    def _put(self, sequence: SequenceId, link: BlockLink, part: Part) -> bool:
        body = self._model.export_block(sequence, part, link.start, link.stop)
        return self._store.put(StoredBlock(BlockHeader(link, part, self._layout.name), body))
