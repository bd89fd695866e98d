"""An engine on a tiny model, with checks of the memory that it really holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from semantic import AgentBlocks, BlockPool, BlockPoolBatchEngine, CompletedGeneration
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.contiguous.cache import BufferRange, KVBuffer
from semantic.adapters.mlx.kv_cache.contiguous.layers import MlxLmCache, MlxLmState
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagePool
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.application.cache.idle_caches import IdleCaches
from semantic.application.engine.prefill_budget import PrefillBudget
from semantic.domain.value_objects import ModelCacheSpec, SamplingParams
from semantic.ports.generation import Tokenizer
from semantic.ports.store import StorePort
from tests.support.char_tokenizer import CharTokenizer
from tests.support.drafted import DRAFTED, OracleSource
from tests.support.in_pages import tiny_backend
from tests.support.reference import generate
from tests.support.tiny_models import tiny_model

Done = CompletedGeneration

_LONGEST_DRAFT = 24
"""The tokens that a draft may have."""


def cache_bytes(backend: MLXBackend) -> int:
    """Bytes of the arrays of all open sequences' caches."""
    return sum(cache.nbytes for caches in backend.sequences() for cache in caches)


def following(architecture: str, tokens: Sequence[int]) -> Sequence[int]:
    """What the model alone answers to `tokens`."""
    return generate(tiny_model(architecture.removesuffix(DRAFTED)), list(tokens), _LONGEST_DRAFT)


class Rig:
    """One engine and its parts."""

    def __init__(
        self,
        architecture: str,
        *,
        columns: int = 200,
        chunk: int | None = None,
        eos: frozenset[int] = frozenset(),
        max_batch: int = 32,
        prefix_store: StorePort | None = None,
        texts: MLXTokenizer | None = None,
        answers: Callable[[Sequence[int]], Sequence[int]] | None = None,
    ) -> None:
        """The pool holds `columns` blocks of every layer; `chunk` fixes the prefill chunk. Drafts
        are of `answers`, by default the model's own.

        With the tokenizer `texts`, answers can be constrained to grammars.
        """
        self.backend: MLXBackend = tiny_backend(architecture, f"tiny:{architecture}", texts)
        self.model = self.backend.model
        # The probe falls back to mlx-lm's cache for a layer that disagrees: answers would be right,
        # and our cache untested.
        assert all(self.backend.ragged_layers), "a layer does not use our cache"
        self.spec: ModelCacheSpec = self.backend.cache_spec()
        self.pool: BlockPool = BlockPool(self.spec, columns * self.spec.n_layers)
        self.tokenizer: Tokenizer = texts or CharTokenizer(eos)
        budget = PrefillBudget() if chunk is None else FixedBudget(chunk)
        self.engine: BlockPoolBatchEngine = BlockPoolBatchEngine(
            self.backend,
            self.tokenizer,
            self.pool,
            self.spec,
            store=prefix_store,
            budget=budget,
            max_batch=max_batch,
        )
        self.drafts = OracleSource(answers or functools.partial(following, architecture))
        if architecture.endswith(DRAFTED):
            self.engine.draft_from(self.drafts)

    @property
    def store(self) -> IdleCaches:
        """The idle caches in the pool."""
        return self.engine.idle_caches

    def run(self) -> dict[str, Done]:
        """Run until all requests are done; completions by uid."""
        return {done.uid: done for done in self.engine.step()}

    def answer(
        self,
        agent_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        cache: AgentBlocks | None = None,
        sampling: SamplingParams | None = None,
    ) -> Done:
        """One request, alone."""
        uid = self.engine.submit(
            agent_id, prompt, cache=cache, max_tokens=max_tokens, sampling=sampling
        )
        return self.run()[uid]

    @property
    def pages(self) -> list[PagePool]:
        """The pages of each kind of layers; none if caches are contiguous."""
        layers: object = self.backend._layers
        return layers.pools if isinstance(layers, PagedLayers) else []

    def held_bytes(self) -> int:
        """Bytes of the arrays, or columns, of running sequences and idle caches."""
        if self.pages:
            return sum(pages.n_used * pages.kind.page_bytes for pages in self.pages)
        blocks = [
            block.layer_data
            for key in self.store.lru_order()
            for block in getattr(self.store.get(key), "all_blocks", list)()
        ]
        idle: dict[int, KVBuffer | MlxLmCache] = {}
        for piece in blocks:
            if isinstance(piece, BufferRange):
                idle[id(piece.buffer)] = piece.buffer
            elif isinstance(piece, MlxLmState):
                idle[id(piece.cache)] = piece.cache
        return cache_bytes(self.backend) + sum(one.nbytes for one in idle.values())

    def check(self) -> None:
        """The engine's accounting agrees with the arrays."""
        self.engine.check_integrity()
        held, counted = self.held_bytes(), self.pool.used_bytes
        if self.pages:
            # A shared page exists once, but counts for each running sequence.
            assert held <= counted, (held, counted)
            assert len(self.pages) > 1 or self.pages[0].nbytes <= self.pool.capacity_bytes
            return
        # A state is counted before there is one: from when a sequence is opened.
        states = sum(layer.state_bytes for layer in self.spec.layers)
        missing = states * len(self.backend.sequences())
        assert -missing <= held - counted + 0.02 * max(held, counted), (held, counted)
        assert held - counted <= 0.02 * max(held, counted), (held, counted)

    def forget_all(self) -> None:
        """Drop every idle cache."""
        for key in self.store.lru_order():
            self.engine.forget(key.agent_id)


class FixedBudget(PrefillBudget):
    """Chunks of a fixed size, so that a test does not depend on the clock."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self._chunk = chunk

    def tokens_left(
        self, n_prefilled: int, passes: int, *, decoding: int, prompts: int, concurrent: bool
    ) -> int:
        """The fixed size, less what the step has computed."""
        del passes, decoding, prompts, concurrent
        return self._chunk - n_prefilled
