"""PrefixStore: the prefix cache. Finds, restores and saves requests' blocks in a block store.

A failing store never fails a request: the engine then computes the tokens itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from semantic.application.cache.agent_notes import match_report, parent_after
from semantic.application.cache.checkpoint_plan import FEWEST_TOKENS
from semantic.application.cache.loading import BreakEven, Loader
from semantic.application.cache.prefix_lookup import PrefixLookup, StoredPrefix
from semantic.application.cache.saving import BlockSaver, Export, RequestState
from semantic.application.cache.shared_prefill import SharedPrefill
from semantic.application.request import Phase, Request
from semantic.domain.block_hash import (
    ANY_CHIP,
    PUBLIC_TENANT,
    BlockHash,
    Scope,
    namespace_of,
    tenant_tag,
)
from semantic.domain.match import MatchEnd
from semantic.domain.prefix import common_prefix, turns_before
from semantic.domain.stored import BlockHeader, Manifest, Tier
from semantic.domain.value_objects import BLOCK_TOKENS, SequenceId
from semantic.ports.generation import BatchBackend, Clock
from semantic.ports.store import StorePort

_PAGE = 64
"""The number of manifests per query."""
_READ_PART = 16
"""The divisor of the memory limit, for the data that loads have read but not copied."""


class PrefixStore:
    """Shares computed blocks between requests with equal prefixes, and across restarts. Callers
    of `find` and `decline` hold the engine's lock."""

    def __init__(
        self,
        model: BatchBackend,
        store: StorePort,
        *,
        prefill_seconds: Callable[[int], float | None],
        model_name: str = "",
        now: Callable[[], float] = time.time,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`prefill_seconds` estimates the seconds of prefill for a number of tokens. `now`
        returns Unix time in seconds."""
        self._model = model
        self._spec = model.cache_spec()
        self._layout = model.layout()
        self._store = store
        self._lookup = PrefixLookup(store, self._layout)
        self._loader = Loader(model, store, clock)
        self._saver = BlockSaver(model, store)
        self.break_even = BreakEven(prefill_seconds)
        self._any_chip = model.model_id.startswith(ANY_CHIP)
        self._namespace = namespace_of(model.model_id, self._layout.name)
        self._other_namespace = namespace_of(model.model_id, self._layout.other_name)
        self._model_name = model_name
        self._now = now
        self._scopes: dict[str, Scope] = {}
        self._salts: dict[tuple[str, str], bytes] = {}
        self._states: dict[str, RequestState] = {}
        self.shared = SharedPrefill(
            self._spec,
            self._next_block,
            needs_checkpoint=self._layout.needs_checkpoint,
            best_chunk=model.best_chunk,
        )
        self._public: list[tuple[int, ...]] = []
        self.restored_bytes: Counter[Tier] = Counter()  # since the start, complete loads only

    def keep_within(self, n_bytes: int) -> None:
        """Let data that loads have read but not copied take at most 1/16 of `n_bytes`."""
        self._loader.keep_within(n_bytes // _READ_PART)

    def resumes(self, request: Request) -> bool:
        """Return whether a preempted request can resume from its saved sequence."""
        return not self._layout.needs_checkpoint or request.to_prefill > 0

    # Agents

    def scope(self, tenant: str) -> Scope:
        """Return the scope in which requests of `tenant` share blocks."""
        if tenant not in self._scopes:
            tag = tenant_tag(self._store.secret, tenant)
            self._scopes[tenant] = Scope(self._namespace, tag)
        return self._scopes[tenant]

    def make_public(self, tokens: Sequence[int]) -> None:
        """Share PUBLIC_TENANT's blocks of `tokens` with every tenant."""
        self._public.append(tuple(tokens))

    def manifest(self, agent_id: str, tenant: str) -> Manifest | None:
        """Return the agent's newest manifest, or None."""
        return self._store.agents.manifest(self.scope(tenant), agent_id)

    def texts_of(self, tenant: str) -> Iterator[Sequence[int]]:
        """Yield the tokens of the tenant's saved agents, newest first. Any thread may call this."""
        scope, after = self.scope(tenant), None
        while found := self._store.agents.page(scope, _PAGE, after):
            yield from (one.token_ids for one in found)
            after = found[-1].place

    def share_salt(self, agent_id: str, new_agent_id: str, tenant: str) -> None:
        """Give a fork the salt of its original, so that it finds imported blocks."""
        salt = self._salt(agent_id, tenant, self.manifest(agent_id, tenant))
        if salt:
            self._salts[tenant, new_agent_id] = salt

    def has_salt(self, agent_id: str, tenant: str) -> bool:
        """Return whether only the agent may use its blocks, as they come from an archive."""
        return (tenant, agent_id) in self._salts

    def save(self, manifest: Manifest) -> None:
        """Save `manifest` as the newest one of its agent."""
        self._store.agents.save(replace(manifest, generation=0, saved_at=self._now()))

    def forget(self, agent_id: str, tenant: str) -> bool:
        """Remove the agent's manifest. Its blocks stay until eviction."""
        self._salts.pop((tenant, agent_id), None)
        return self._store.agents.remove(self.scope(tenant), agent_id)

    # Restoring

    def find(self, request: Request) -> StoredPrefix | None:
        """Return a waiting request's stored prefix, or None."""
        state, request.reuse.any_chip = self._state(request), self._any_chip
        if not state.searched:
            state.searched = True
            prefix = self._search(request, start=0)
            if prefix is None and request.reuse.history is None and self._has_other_bits(request):
                request.reuse.end = MatchEnd.OTHER_BITS
            if prefix is not None:
                self.shared.parts_at(request, prefix.junction)
                if not prefix.length:
                    prefix = None  # other requests' blocks, with no checkpoint to resume from
            state.prefix = self._worthwhile(prefix, request)
        return state.prefix

    def trusts_pool(self, request: Request, length: int) -> bool:
        """Return True if the store has less than a block beyond the `length` tokens in the pool.
        The request then looks for its stored blocks only when it saves its own."""
        state, most = self._state(request), self._spec.reusable(request.n_tokens - 1)
        if state.searched or self._layout.needs_checkpoint or most >= length + BLOCK_TOKENS:
            return False
        state.stored_blocks, state.is_unproven = length // BLOCK_TOKENS, True
        return True

    def decline(self, request: Request) -> None:
        """Record that the request uses a prefix in the pool instead of the stored prefix."""
        state = self._state(request)
        if state.prefix is not None:
            self.shared.continues_from(request, state.prefix.length)

    def begin_load(self, request: Request) -> bool:
        """Start to read the prefix from `find`; return False if it is None. Raises BackendError."""
        state = self._state(request)
        prefix, state.prefix = state.prefix, None
        if prefix is not None and state.is_ahead:
            found = self._store.find([header.key for header in prefix.headers])
            prefix, state.is_ahead = replace(prefix, found=found), False
        return prefix is not None and self._begin(request, prefix)

    def load_next_blocks(self, request: Request) -> bool:
        """Start to read the request's next blocks if other requests have computed them. Returns
        False if no read starts. Raises BackendError."""
        if self._layout.needs_checkpoint or request.computed % BLOCK_TOKENS:
            return False
        if request.computed // BLOCK_TOKENS >= self._blocks_to_compute(request):
            return False  # less than a block remains
        if request.reuse.end is MatchEnd.DAMAGED:
            return False  # the lookup would return the same unreadable block
        prefix = self._worthwhile(self._search(request, start=request.computed), request)
        return prefix is not None and self._begin(request, prefix)

    def has_next_checkpoint(self, request: Request) -> bool:
        """Return whether the request can continue from a checkpoint of another request."""
        if not self.shared.looks_again(request):
            return False
        prefix = self._search(request, start=0)
        if prefix is not None and prefix.length < request.computed + FEWEST_TOKENS:
            prefix = None
        prefix = self._state(request).prefix = self._worthwhile(prefix, request)
        if prefix is None:
            self.shared.in_vain(request)
        return prefix is not None

    def is_loading(self, request: Request) -> bool:
        """Return whether the request has an unfinished load."""
        return self._state(request).load is not None

    def is_loaded(self, request: Request) -> bool:
        """Return whether `finish_load` would not block."""
        load = self._state(request).load
        return load is None or load.done

    def wait_for_load(self, requests: Iterable[Request], seconds: float) -> None:
        """Wait until a load of one of `requests` ends, at most `seconds`."""
        loads = (self._state(request).load for request in requests)
        self._loader.wait([load for load in loads if load is not None], seconds)

    def finish_load(self, request: Request) -> None:
        """Put the verified blocks of the request's load into its sequence. Raises BackendError."""
        state, reuse = self._state(request), request.reuse
        load, state.load = state.load, None
        if load is None:
            return
        loaded = self._loader.finish(load)
        if loaded.end is not MatchEnd.DAMAGED or loaded.seconds > load.terms.seconds:
            self.break_even.observe(loaded.bytes_by_tier, loaded.seconds, loaded.n_reads)
        if loaded.end is MatchEnd.SLOWER:
            state.preferred = load.prefix.length
        request.computed = loaded.length
        request.cached_tokens += loaded.length - load.prefix.start
        request.cached_tokens = min(request.cached_tokens, len(request.prompt) - 1)
        # Public blocks are in another scope: the store still needs the agent's own chain in full.
        state.stored_blocks = 0 if load.prefix.is_public else loaded.length // BLOCK_TOKENS
        self.shared.continues_from(request, loaded.length)
        reuse.end = loaded.end if loaded.length >= state.unread else MatchEnd.DAMAGED
        unreadable = load.prefix.checkpoint is not None and loaded.end is MatchEnd.DAMAGED
        if unreadable and not loaded.length:
            # The store quarantined a body, or a longer block replaced it: look for the rest.
            self.shared.read_in_vain(request, look_again=not state.unread)
            state.unread = state.unread or load.prefix.length
        if loaded.length > load.prefix.start:
            if loaded.end is not MatchEnd.DAMAGED:
                self.restored_bytes.update(loaded.bytes_by_tier)
            reuse.source = load.prefix.source.value
            if not load.prefix.is_public:
                state.read += load.prefix.headers
            self._store.touch([header.key for header in load.prefix.headers])

    # Reading ahead. Its thread calls all but `find_ahead`

    @property
    def ahead_bytes(self) -> int:
        """See `Prefixes.ahead_bytes`."""
        tiers = (one.max_bytes for one in self._store.stats() if one.tier is Tier.MEMORY)
        return sum(tiers) // 2

    def find_ahead(self, request: Request) -> StoredPrefix | None:
        """Return the request's stored prefix if a part of the prefix is on disk, else None."""
        prefix = self.find(request)
        if prefix is None or not prefix.bytes_in(Tier.DISK):
            return None
        self._state(request).is_ahead = True
        return prefix

    def stored_prefix(self, agent_id: str, tenant: str) -> StoredPrefix | None:
        manifest = self.manifest(agent_id, tenant)
        if manifest is None:
            return None
        tokens = manifest.token_ids[: self._spec.reusable(len(manifest.token_ids))]
        links = [link for link in manifest.scope.chain(tokens) if link.is_full]
        return self._lookup.find(manifest.scope, links, tokens)

    def prefetch(self, header: BlockHeader) -> bool:
        return self._store.prefetch(header)

    def wait_until_loaded(self, seconds: float) -> bool:
        return self._loader.wait_until_idle(seconds)

    # Saving

    def publish(self, request: Request) -> None:
        """Save the blocks that prefill has completed, for other requests."""
        sequence, state = request.sequence, self._state(request)
        if sequence is None or not request.keep:
            return
        n_full = self._spec.reusable(request.computed) // BLOCK_TOKENS
        if n_full > state.stored_blocks:
            links = state.full_links(self._scope_of(request), request.tokens)
            export = Export(sequence, state.put, interim=True)
            self._saver.put_full(export, links[state.stored_blocks : n_full])
            state.stored_blocks = n_full
        if self.shared.takes_checkpoint(request):
            self._save_to(request, sequence, request.computed, interim=True)
            self._search_again(request)

    def save_blocks(self, request: Request, *, interim: bool) -> int:
        """Save all blocks of the request's open sequence; return its length in tokens. The sequence
        must not be decoding. `interim` is False at the end of a turn."""
        sequence = request.sequence
        if sequence is None:
            return 0
        length = self._model.length(sequence)
        self._save_to(request, sequence, length, interim=interim)
        self._search_again(request)
        return length

    def save_turn(self, request: Request, length: int) -> None:
        """Save the manifest of the request's agent, with the first `length` tokens."""
        # Not the request's manifest: a caller may have pinned the agent meanwhile.
        before = self.manifest(request.agent_id, request.tenant)
        tokens = request.tokens[:length]
        self._store.agents.save(
            Manifest(
                self._scope_of(request),
                request.agent_id,
                tokens,
                turns=1 if before is None else before.turns + 1,
                pinned=before is not None and before.pinned,
                parent=parent_after(before, request.note),
                prompt_tokens=len(request.prompt),
                note=request.note,
                model=self._model_name,
                saved_at=self._now(),
                match=match_report(request),
                earlier=() if before is None else turns_before(tokens, before),
            )
        )

    def discard(self, request: Request) -> None:
        """Drop the request's blocks, because the model computed NaN or infinity."""
        state = self._state(request)
        links = state.full_links(self._scope_of(request), request.tokens)
        self._saver.drop(state.put, links, state.read)
        state.put, state.read, state.stored_blocks = [], [], 0

    # Life of a request, and of the store

    def close_sequence(self, request: Request) -> None:
        """Cancel the request's load, because its sequence is closing."""
        self.shared.release(request)
        state = self._state(request)
        load, state.load = state.load, None
        if load is not None:
            self._loader.give_up(load)

    def preempt(self, request: Request) -> None:
        """Forget the result of `find`, since the store may evict the prefix."""
        state = self._state(request)
        state.prefix, state.searched, state.load = None, False, None
        state.unread = state.preferred = 0
        self.shared.preempt(request)

    def drop(self, request: Request) -> None:
        """Forget the state of a finished request."""
        self.shared.drop(request)
        self._states.pop(request.uid, None)

    def flush(self) -> None:
        """Wait until all data saved so far is durable."""
        self._store.flush()

    def close(self, *, keep_store: bool = False) -> None:
        """End the loader's threads, and close the store unless `keep_store`."""
        self._loader.close()
        if not keep_store:
            self._store.close()

    # Inside

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.uid)
        # Two threads may get here for one request: both must return the same state.
        return self._states.setdefault(request.uid, RequestState()) if state is None else state

    def _scope_of(self, request: Request) -> Scope:
        state = self._state(request)
        if state.scope is None:
            scope = self.scope(request.tenant)
            salt = self._salt(request.agent_id, request.tenant, request.reuse.manifest)
            state.scope = replace(scope, salt=salt) if salt else scope
        return state.scope

    def _salt(self, agent_id: str, tenant: str, manifest: Manifest | None) -> bytes:
        # The pool may hold the agent's cache after its manifest is removed: remember the salt.
        if manifest is not None and manifest.scope.salt:
            self._salts[tenant, agent_id] = manifest.scope.salt
        return self._salts.get((tenant, agent_id), b"")

    def _begin(self, request: Request, prefix: StoredPrefix) -> bool:
        if request.sequence is None:
            raise AssertionError("cannot load a request that is not open")
        # The request reads this block instead of computing it: others need not wait for it.
        self.shared.release(request)
        state = self._state(request)
        state.load = self._loader.begin(prefix, request.sequence, state.terms)
        return True

    def _next_block(self, request: Request) -> BlockHash | None:
        number, n_full = request.computed // BLOCK_TOKENS, self._blocks_to_compute(request)
        if number >= n_full:
            return None
        state = self._state(request)
        if len(state.links) < n_full:
            state.full_links(self._scope_of(request), request.tokens[:-1])
        return state.links[number].hash

    def _blocks_to_compute(self, request: Request) -> int:
        return self._spec.reusable(request.n_tokens - 1) // BLOCK_TOKENS

    def _search(self, request: Request, start: int) -> StoredPrefix | None:
        # The last token must run to give the logits of the next.
        tokens = request.tokens[: self._spec.reusable(request.n_tokens - 1)]
        scope = self._scope_of(request)
        state = self._state(request)
        links = state.full_links(scope, tokens)
        prefix = self._lookup.find(scope, links, tokens, start)
        if prefix is not None:
            request.reuse.end = prefix.end
            state.stored_blocks = max(state.stored_blocks, prefix.known // BLOCK_TOKENS)
        public = None if start else self._search_public(tokens)
        if public is None or (prefix is not None and prefix.length >= public.length):
            return prefix
        request.reuse.end = public.end
        return public

    def _has_other_bits(self, request: Request) -> bool:
        scope = replace(self.scope(request.tenant), namespace=self._other_namespace)
        agents, is_possible = self._store.agents, bool(self._layout.other_name)
        return is_possible and agents.manifest(scope, request.agent_id) is not None

    def _search_public(self, tokens: Sequence[int]) -> StoredPrefix | None:
        length = max((common_prefix(one, tokens) for one in self._public), default=0)
        if not length:
            return None
        scope, shared = self.scope(PUBLIC_TENANT), tokens[:length]
        links = [link for link in scope.chain(shared) if link.is_full]
        found = self._lookup.find(scope, links, shared)
        return None if found is None else replace(found, is_public=True)

    def _worthwhile(self, prefix: StoredPrefix | None, request: Request) -> StoredPrefix | None:
        if prefix is None:
            return None
        state, n_tokens = self._state(request), prefix.length - request.computed
        if prefix.length > state.preferred:
            terms = self.break_even.terms(prefix.bytes_by_tier, n_tokens)
            if terms is not None:
                state.terms = terms
                return prefix
            state.preferred = prefix.length
        request.reuse.end = MatchEnd.SLOWER
        return None

    def _search_again(self, leader: Request) -> None:
        for other in self.shared.beginning_like(leader):
            if other.phase is Phase.WAITING:
                self._state(other).searched = False
            else:
                self.shared.look_again(other)

    def _save_to(
        self, request: Request, sequence: SequenceId, length: int, *, interim: bool
    ) -> None:
        state = self._state(request)
        reusable = self._spec.reusable(length)
        links = state.all_links(self._scope_of(request), request.tokens[:reusable])
        is_whole = state.is_unproven or (self._saver.has_gaps and not interim)
        new = links if is_whole else links[state.stored_blocks :]
        export = Export(sequence, state.put, interim)
        if self._saver.put_full(export, new) and reusable == length:
            self._saver.put_checkpoint(export, links)
            self.shared.took_checkpoint(request, length)
