"""An engine on a tiny model and a disk store, which tests restart at will.

Every answer is compared with that of plain mlx-lm.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from semantic import BlockPool, BlockPoolBatchEngine, CompletedGeneration
from semantic.adapters.mlx.backend import MLXBackend
from semantic.application.cache.loading import Loader
from semantic.application.cache.prefix_lookup import Discovery, PrefixLookup, StoredPrefix
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store, remote_tier
from semantic.domain.block_hash import BlockKey
from semantic.domain.stored import Manifest, Tier
from semantic.domain.value_objects import whole_blocks
from tests.support.bodies import exported
from tests.support.char_tokenizer import CharTokenizer
from tests.support.eight_bits import EIGHT_BITS
from tests.support.in_pages import SUFFIX, tiny_backend
from tests.support.reference import generate, is_answer
from tests.support.rig import Done, FixedBudget
from tests.support.tiny_models import ARCHITECTURES, VOCAB, tiny_model

MIB = 1 << 20

EVERY_ARCHITECTURE = (
    *ARCHITECTURES,
    "gemma3 narrow",
    "gemma3 wide",
    "windows",
    "stablelm",
    "lfm2",
    "recurrent_gemma",
    "falcon_h1",
    *EIGHT_BITS,
)
TINY_MEMORY = 4096
"""A memory tier that holds next to nothing, so that the disk is read."""


def text(n_tokens: int, seed: int) -> tuple[int, ...]:
    """`n_tokens` token ids; the beginnings of texts of one seed are alike."""
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(n_tokens))


@functools.cache
def _plain(architecture: str, prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(generate(tiny_model(architecture), prompt, n))


def plain(architecture: str, prompt: Sequence[int], n: int) -> tuple[int, ...]:
    """What mlx-lm answers without any engine or store."""
    return _plain(architecture, tuple(prompt), n)


@functools.cache
def _is_answer(architecture: str, prompt: tuple[int, ...], tokens: tuple[int, ...], n: int) -> bool:
    return is_answer(tiny_model(architecture), prompt, tokens, n)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and how many tokens it is to give."""

    agent: str
    prompt: tuple[int, ...]
    n: int = 6
    tenant: str = ""


class Durable:
    """One life of an engine over the store in `folder`."""

    def __init__(
        self,
        architecture: str,
        folder: Path,
        *,
        columns: int = 200,
        chunk: int = 512,
        memory_bytes: int = 64 * MIB,
        disk_bytes: int = 256 * MIB,
        fleet: tuple[str, Path] | None = None,
        backend: MLXBackend | None = None,
    ) -> None:
        """With `fleet`, the URL of its object store and the file of its secret, it is a replica.
        `backend` is one that is there already."""
        remote, secret = fleet or (None, None)
        settings = Settings(
            use_disk=True,
            store=folder,
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            remote=remote,
            fleet_secret=secret,
        )
        self.architecture = architecture.removesuffix(SUFFIX)
        self.store = open_store(settings)
        # Not `Rig`: some of the models here keep mlx-lm's own caches.
        self.backend = backend or tiny_backend(architecture, f"tiny:{self.architecture}")
        spec = self.backend.cache_spec()
        self.pool: BlockPool = BlockPool(spec, columns * spec.n_layers)
        self.engine: BlockPoolBatchEngine = BlockPoolBatchEngine(
            self.backend,
            CharTokenizer(),
            self.pool,
            spec,
            store=self.store,
            # Sized by the clock, chunks would differ from run to run, and with them the last bits.
            budget=FixedBudget(chunk),
        )
        tier = remote_tier(self.store)
        self.discovery = None if tier is None else Discovery(self.backend, self.store, tier)
        self.needs_checkpoint = self.backend.layout().needs_checkpoint

    # Asking

    def submit(self, asked: Asked) -> str:
        """The request's uid."""
        if self.discovery is not None:
            self.discovery.begin(asked.agent, asked.tenant, asked.prompt).result()
        return self.engine.submit(
            asked.agent, asked.prompt, max_tokens=asked.n, tenant=asked.tenant
        )

    def ask(self, agent: str, prompt: Sequence[int], n: int = 6, *, tenant: str = "") -> Done:
        """One request, alone; its answer is the right one."""
        (done,) = self.ask_all([Asked(agent, tuple(prompt), n, tenant)])
        return done

    def ask_all(self, asked: Sequence[Asked], *, steps_between: int = 0) -> list[Done]:
        """Requests that run together, each joining `steps_between` after the one before."""
        ended: dict[str, Done] = {}
        uids = []
        for one in asked:
            uids.append(self.submit(one))
            for _ in range(steps_between):
                for event in self.engine.step_once():
                    if isinstance(event, CompletedGeneration):
                        ended[event.uid] = event
        ended |= {done.uid: done for done in self.engine.step()}
        self.engine.check_integrity()
        for uid, one in zip(uids, asked, strict=True):
            self.require_right(one, ended[uid])
        return [ended[uid] for uid in uids]

    def require_right(self, asked: Asked, done: Done) -> None:
        """The answer is that of plain mlx-lm, or parts from it between equally good tokens."""
        assert done.finish_reason == "length", (asked.agent, done.error)
        right = _is_answer(self.architecture, asked.prompt, done.tokens, asked.n)
        where = self.architecture, asked.agent, len(asked.prompt), done.match
        assert right, (where, done.tokens, plain(self.architecture, asked.prompt, asked.n))

    # Looking

    def manifest(self, agent: str) -> Manifest:
        """The agent as it was saved."""
        manifest = self.engine.manifest(agent)
        assert manifest is not None, agent
        return manifest

    def counts(self, tier: Tier = Tier.DISK) -> Mapping[str, int]:
        """What happened in a tier since it was opened."""
        return next(stats.counts for stats in self.store.stats() if stats.tier is tier)

    def bodies(self, agent: str) -> dict[BlockKey, bytes]:
        """All that the store has for going on where the agent is."""
        prefix = self._prefix(agent)
        found = {header.key: self.store.read(header) for header in prefix.headers}
        bodies = {key: body for key, body in found.items() if body is not None}
        assert bodies.keys() == found.keys()
        return bodies

    def restored_bodies(self, agent: str) -> dict[BlockKey, bytes]:
        """The same, restored into a sequence and taken out of that again."""
        prefix, model = self._prefix(agent), self.backend
        loader = Loader(model, self.store)
        sequence = model.open(whole_blocks(prefix.length + 1))
        load = loader.begin(prefix, sequence)
        loader.wait([load], 60.0)
        assert loader.finish(load).length == prefix.length == model.length(sequence)
        bodies = {
            header.key: exported(model, sequence, header.part, header.link.start, header.link.stop)
            for header in (*prefix.full, *prefix.window)
        }
        if prefix.checkpoint is not None:
            bodies[prefix.checkpoint.key] = model.export_checkpoint(sequence)
        model.close(sequence)
        loader.close()
        return bodies

    def _prefix(self, agent: str) -> StoredPrefix:
        manifest = self.manifest(agent)
        links = [link for link in manifest.scope.chain(manifest.token_ids) if link.is_full]
        finder = PrefixLookup(self.store, self.backend.layout())
        prefix = finder.find(manifest.scope, links, manifest.token_ids)
        assert prefix is not None
        assert prefix.length == len(manifest.token_ids)
        return prefix

    # Life

    def close(self) -> None:
        """End in order: what was accepted is on disk, and in the object store."""
        if self.discovery is not None:
            self.discovery.close()
        self.engine.close()


@contextmanager
def running(architecture: str, folder: Path, **options: object) -> Iterator[Durable]:
    """One life, ended in order."""
    life = Durable(architecture, folder, **options)  # type: ignore[arg-type]
    try:
        yield life
    finally:
        life.close()


def digest_of(bodies: Mapping[BlockKey, bytes]) -> str:
    """The same for the same bodies."""
    digest = hashlib.sha256()
    for key in sorted(bodies, key=lambda key: (key.hash, key.part)):
        digest.update(key.hash + key.part.encode() + bodies[key])
    return digest.hexdigest()


def history(prompt: Sequence[int], done: Done) -> tuple[int, ...]:
    """What the agent holds after the answer."""
    return (*prompt, *done.tokens)


def edited(tokens: Sequence[int], at: int) -> tuple[int, ...]:
    """`tokens` with another one at position `at`."""
    return (*tokens[:at], (tokens[at] + 1) % VOCAB, *tokens[at + 1 :])
