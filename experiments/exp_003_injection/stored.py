"""Caches that another process saved to a block store, ready to be injected.

That process is this module: run python -m ...stored SUBJECT FOLDER NEW_TOKENS. The engine answers
both prompts with a disk store, and prints for each how much of the prompt its cache held.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from experiments import subjects
from experiments.exp_003_injection.cases import prompts_of
from experiments.exp_004_extraction.files import digest_of_first
from experiments.harness.environment import ROOT
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.kv_cache.contiguous.cache import SequenceCache
from semantic.adapters.mlx.kv_cache.forms import LayerCache
from semantic.application.cache.loading import Loader
from semantic.application.cache.prefix_lookup import PrefixLookup
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store
from semantic.domain.block_hash import Scope, namespace_of, tenant_tag
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import whole_blocks
from semantic.ports.store import StorePort

BLOCKS = 20_000
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """Caches with all of a prompt but its last token, and how long it took to read them."""

    caches: list[LayerCache]
    ms: float
    digest: str


class StoreReader:
    """Loads prompts from a store that another process has filled."""

    def __init__(self, backend: MLXBackend, folder: Path) -> None:
        self._backend = backend
        self._store: StorePort = open_store(Settings(use_disk=True, store=folder))
        self._loader = Loader(backend, self._store)
        self._finder = PrefixLookup(self._store, backend.layout())
        namespace = namespace_of(backend.model_id, backend.layout().name)
        self._scope = Scope(namespace, tenant_tag(self._store.secret, ""))

    def load(self, prompt: Sequence[int], room: int) -> Loaded:
        """Raises LookupError unless all but the prompt's last token is there."""
        begun = time.perf_counter()
        tokens = tuple(prompt[:-1])
        links = [link for link in self._scope.chain(tokens) if link.is_full]
        prefix = self._finder.find(self._scope, links, tokens)
        if prefix is None or prefix.length != len(tokens):
            raise LookupError(f"expected {len(tokens)} stored tokens, found {prefix}")
        sequence = self._backend.open(whole_blocks(len(prompt) + room))
        load = self._loader.begin(prefix, sequence)
        self._loader.wait([load], _SECONDS)
        loaded = self._loader.finish(load)
        ms = 1000 * (time.perf_counter() - begun)
        if loaded.length != len(tokens):
            raise LookupError(f"{loaded.length} of {len(tokens)} tokens were proven")
        caches = self._backend.sequences()[-1]
        self._backend.close(sequence)  # the caller owns them now
        return Loaded(caches, ms, digest_of(caches, len(tokens)))

    def close(self) -> None:
        """End the threads and the store."""
        self._loader.close()
        self._store.close()


def digest_of(caches: Sequence[LayerCache], n_tokens: int) -> str:
    """SHA-256 of the keys and values of the first tokens, layer by layer."""
    found = hashlib.sha256()
    for cache in caches:
        if isinstance(cache, SequenceCache):
            for array in cache.buffer.read(0, n_tokens):
                found.update(cast("bytes", memoryview(cast("bytes", mx.contiguous(array)))))
    return found.hexdigest()


def save_elsewhere(subject_name: str, folder: Path, new: int) -> Mapping[str, str]:
    """Let another process answer and store; per prompt the digest of what it had."""
    module = "experiments.exp_003_injection.stored"
    done = subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", module, subject_name, str(folder), str(new)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


def saved(subject_name: str, folder: Path, new: int) -> Iterator[tuple[str, str]]:
    """Answer both prompts in one batch, keep what was computed, and tell its digests."""
    subject = subjects.load(subject_name)
    backend, prompts = subject.backend, prompts_of(subject, new)
    pool = BlockPool(backend.cache_spec(), total_blocks=BLOCKS)
    store = open_store(Settings(use_disk=True, store=folder))
    engine = BlockPoolBatchEngine(
        backend, subjects.TokenIds(), pool, backend.cache_spec(), store=store
    )
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_tokens=new)
    for done in engine.step():
        if done.blocks is None:
            raise TypeError(f"{done.agent_id} ended without a cache: {done.error}")
        yield done.agent_id, digest_of_first(done.blocks, len(prompts[done.agent_id]) - 1)
    engine.close()


if __name__ == "__main__":
    for pair in saved(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])):
        print(json.dumps(pair))
