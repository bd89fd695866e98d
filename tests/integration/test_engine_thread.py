"""A real model on a thread of its own: the answers of plain mlx-lm, also after the engine broke."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.stores.memory import MemoryStore
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.submission import Submission
from semantic.bootstrap import App, build_engine, rebuild_app
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store
from semantic.domain.errors import IntegrityError, InvalidRequestError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import CompletedGeneration, SampledToken
from semantic.ports.generation import EngineEvent
from semantic.ports.store import StorePort
from tests.support.char_tokenizer import CharTokenizer
from tests.support.durable import MIB, plain, text
from tests.support.in_pages import tiny_backend
from tests.support.lanes import more, more_rows
from tests.support.rig import FixedBudget
from tests.support.tiny_models import tiny_model
from tests.unit.application.world import world

pytestmark = pytest.mark.process

PATIENCE = 120.0
Engine = BlockPoolBatchEngine
Done = CompletedGeneration


class Served:
    """A tiny model on a thread, built there and, when it breaks, built again there."""

    def __init__(self, architecture: str, settings: Settings) -> None:
        self.architecture = architecture
        self.settings = settings
        self.failures: list[Exception] = []
        self.built_on: list[int] = []
        self.store: StorePort | None = None
        self.thread: EngineThread = EngineThread(
            self._build, self._build, on_failure=self.failures.append
        )

    def _build(self) -> Engine:
        """Around the same weights and, after the first time, the same store."""
        self.built_on.append(threading.get_ident())
        model = tiny_backend(self.architecture, f"tiny:{self.architecture}")
        spec = model.cache_spec()
        pool: BlockPool = BlockPool(spec, 200 * spec.n_layers)
        self.store = self.store or open_store(self.settings)
        # Sized by the clock, chunks would differ from run to run, and with them the last bits.
        budget = FixedBudget(512)
        return BlockPoolBatchEngine(
            model, CharTokenizer(), pool, spec, store=self.store, budget=budget
        )

    def ask(self, agent: str, prompt: Sequence[int], n: int = 6) -> Done:
        return ask(self.thread, agent, prompt, n)


def ask(thread: EngineThread, agent: str, prompt: Sequence[int], n: int = 6) -> Done:
    """One request from whatever thread this is; returns when it has ended."""
    ended = threading.Event()
    heard: list[EngineEvent] = []

    def listen(events: Sequence[EngineEvent]) -> None:
        heard.extend(events)
        if isinstance(events[-1], CompletedGeneration):
            ended.set()

    thread.submit(Submission(agent, tuple(prompt), n), listen).accepted.result(PATIENCE)
    assert ended.wait(PATIENCE)
    (done,) = [event for event in heard if isinstance(event, CompletedGeneration)]
    return done


def break_next_step(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The next decode step raises what no backend should."""
    decode = MLXBackend.decode

    def breaks(_: MLXBackend) -> list[SampledToken]:
        monkeypatch.setattr(MLXBackend, "decode", decode)
        raise error

    monkeypatch.setattr(MLXBackend, "decode", breaks)


@contextmanager
def served(architecture: str, settings: Settings) -> Iterator[Served]:
    """On the air, and ended in order."""
    of = Served(architecture, settings)
    of.thread.start()
    of.thread.ready.result(PATIENCE)
    try:
        yield of
    finally:
        assert of.thread.stop()


def memory() -> Settings:
    return Settings(memory_bytes=64 * MIB)


@pytest.mark.parametrize("architecture", ["gemma3", *more("llama", "qwen2")])
def test_eight_threads_get_the_answers_of_the_model_alone(architecture: str) -> None:
    prompts = [text(40 + 50 * i, seed=i) for i in range(8)]
    with served(architecture, memory()) as of, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: of.ask(f"agent {i}", prompts[i], 12), range(8)))
        assert of.built_on != [threading.get_ident()]
        of.thread.call(lambda engine: engine.check_integrity()).result(PATIENCE)
    # Plain mlx-lm runs here only now: elsewhere is another thread's stream.
    for prompt, done in zip(prompts, answers, strict=True):
        assert done.tokens == plain(architecture, prompt, 12), (done.finish_reason, done.error)


@pytest.mark.parametrize("architecture", ["gemma3", *more("llama")])
@pytest.mark.parametrize(
    ("use_disk", "error"),
    [
        (False, MemoryError()),
        (True, IntegrityError("a wrong account")),
        *more_rows((False, IntegrityError("a wrong account")), (True, MemoryError())),
    ],
)
def test_idle_agents_are_still_there_after_the_engine_broke(
    architecture: str,
    use_disk: bool,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With a disk the memory tier holds next to nothing, so that the disk is read.
    settings = Settings(
        memory_bytes=4096 if use_disk else 64 * MIB,
        use_disk=use_disk,
        store=tmp_path / "store" if use_disk else None,
        disk_bytes=256 * MIB if use_disk else None,
    )
    prompt = text(700, seed=1)
    with served(architecture, settings) as of:
        first = of.ask("ann", prompt)
        engine = of.thread.call(weakref.ref).result(PATIENCE)
        break_next_step(monkeypatch, error)
        broken = of.ask("bob", text(300, seed=2))
        assert broken.finish_reason == "error"
        assert of.failures == [error]
        longer = (*prompt, *first.tokens, 5, 6, 7)
        again = of.ask("ann", longer)
        assert again.cached_tokens >= 512
        other = of.ask("bob", text(300, seed=2))
        assert of.thread.figures.rebuilds == 1
        assert len(set(of.built_on)) == 1
        assert engine() is None, "the broken engine's arrays are gone"
        of.thread.call(lambda engine: engine.check_integrity()).result(PATIENCE)
    assert first.tokens == plain(architecture, prompt, 6)
    assert again.tokens == plain(architecture, longer, 6)
    assert other.tokens == plain(architecture, text(300, seed=2), 6)


def test_the_model_that_ships_is_built_again_around_its_weights_and_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apps: list[App] = []

    def build() -> Engine:
        apps.append(build_engine(Settings(pool_bytes=32 * MIB, memory_bytes=64 * MIB)))
        return apps[-1].engine

    def rebuild() -> Engine:
        apps.append(rebuild_app(apps[-1]))
        return apps[-1].engine

    thread: EngineThread = EngineThread(build, rebuild)
    thread.start()
    thread.ready.result(PATIENCE)
    prompt = text(600, seed=1)
    before = ask(thread, "ann", prompt)
    break_next_step(monkeypatch, MemoryError())
    assert ask(thread, "bob", text(300, seed=2)).finish_reason == "error"
    after = ask(thread, "ann", prompt)
    assert thread.stop()
    assert after.cached_tokens >= 512
    assert after.tokens == before.tokens
    first, second = apps
    assert second.store is first.store
    assert second.pool is not first.pool
    assert second.pool.max_bytes == first.pool.max_bytes == 32 * MIB
    assert second.model is not first.model
    assert second.model.model_id == first.model.model_id


def test_only_a_loaded_model_can_be_wrapped_again() -> None:
    of, store = world(), MemoryStore(MIB)
    app = App(of.engine, of.backend, CharTokenizer(), of.pool, of.spec, store, Settings())
    with pytest.raises(InvalidRequestError, match="expected a loaded model, got FakeBackend"):
        rebuild_app(app)


def test_a_model_that_ran_on_one_thread_runs_on_another_with_the_same_caches() -> None:
    model, ragged = tiny_model("llama"), []

    def wrap() -> None:
        ragged.append(wrap_model(model).ragged_layers)

    for _ in range(2):
        thread = threading.Thread(target=wrap)
        thread.start()
        thread.join()
    wrap()
    assert all(map(all, ragged))


_READS_CONSTANTS = """
import importlib, pkgutil, threading
import mlx.core as mx
import semantic.adapters.mlx as package

arrays = []
for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    module = importlib.import_module(found.name)
    arrays += [value for value in vars(module).values() if isinstance(value, mx.array)]
thread = threading.Thread(target=lambda: print([one.tolist() for one in arrays]))
thread.start()
thread.join()
"""


def test_constants_can_be_read_on_another_thread_than_the_one_that_imported_them() -> None:
    command = [sys.executable, "-c", _READS_CONSTANTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[[0, 1, 2, 3, 4, 5, 6, 7]]", done.stderr
