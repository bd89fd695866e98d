"""The process stays within its memory, as the system counts it, and answers as without a limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx import device
from semantic.adapters.mlx.device import free_memory, give_memory_back, memory_in_use
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.stores.memory import MemoryStore
from semantic.application.engine.engine_thread import EngineThread
from semantic.application.engine.memory_guard import Memory, MemoryGuard
from semantic.application.engine.step_loop import StepLoop
from semantic.application.engine.submission import Submission
from semantic.composition.memory_shares import give_up_under_pressure
from semantic.domain.value_objects import CompletedGeneration
from semantic.ports.generation import EngineEvent
from tests.support.char_tokenizer import CharTokenizer
from tests.support.lanes import examples
from tests.support.own_process import in_own_process
from tests.support.tiny_models import VOCAB, randomize

MIB = 1 << 20
CACHES = 400 * MIB
"""The budgets of pool and memory tier, each."""
MORE = 160 * MIB
"""What the process may have beside what it has after the start: a fraction of both."""
AGENTS, TOKENS = 14, 600
BODY, N_BODIES = 1 << 16, 3000

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.process,
]


def wide_llama() -> llama.Model:
    """Little to compute, and 16 KiB of keys and values a token."""
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=32,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=128,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
        )
    )
    randomize(model)
    mx.eval(model.parameters())
    return model


class Answers:
    """What all agents say, in two rounds; the second continues the first."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self.said: list[tuple[int, ...]] = []
        self.cached: list[int] = []

    def ask(self, number: int, prompt: list[int]) -> list[int]:
        ended: Future[CompletedGeneration] = Future()

        def listen(events: Sequence[EngineEvent]) -> None:
            for event in events:
                if isinstance(event, CompletedGeneration):
                    ended.set_result(event)

        self._thread.submit(Submission(f"agent-{number}", prompt, 4), listen)
        done = ended.result(60)
        assert done.error is None
        self.said.append(tuple(done.tokens))
        self.cached.append(done.cached_tokens)
        return [*prompt, *done.tokens]

    def all(self, agents: int) -> None:
        prompts = [[(n * 31 + i * i * 7) % VOCAB for i in range(TOKENS)] for n in range(agents)]
        held = [self.ask(n, prompt) for n, prompt in enumerate(prompts)]
        for n, prompt in enumerate(held):
            self.ask(n, [*prompt, 5, 9, 2])


def run(
    model: llama.Model,
    guard: MemoryGuard | None,
    times: int = 0,
    store: MemoryStore | None = None,
    agents: int = AGENTS,
) -> Answers:
    """With chunks and batch halved so many `times`, and `store` as the memory tier."""
    backend = wrap_model(model, "wide")
    spec = backend.cache_spec()
    store = store or MemoryStore(CACHES)

    def build() -> BlockPoolBatchEngine:
        pool: BlockPool = BlockPool(spec, max_bytes=CACHES)
        return BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec, store=store)

    loop = StepLoop(guard=guard)
    thread = EngineThread(build, loop=loop)
    thread.start()
    thread.ready.result(60)
    if guard is not None:
        guard.add("the memory tier", store.release)
        guard.add("idle caches", loop.evict_idle)
        guard.chunks.times = guard.batch.times = times
    answers = Answers(thread)
    answers.all(agents)
    thread.stop()
    return answers


def test_caches_give_way_before_the_limit_and_no_token_changes() -> None:
    in_own_process("tests.integration.test_memory_guard:within_a_limit")


def within_a_limit() -> None:
    """The answers are those without a limit, which is never exceeded."""
    model = wide_llama()
    free = run(model, None)
    give_memory_back()
    store = MemoryStore(CACHES)
    before, held_before = memory_in_use(), _held(store)
    limit = before + MORE
    measured: list[int] = []

    def in_use() -> int:
        # What the run without a limit has freed may be used again: it counts as if it were new.
        measured.append(max(memory_in_use(), before + _held(store) - held_before))
        return measured[-1]

    lines: list[str] = []
    memory = Memory(in_use, give_memory_back)
    # Each turn measures: the test is over in fewer quarters of a second than turns.
    clock = partial(next, iter(range(1 << 30)))
    bounded = run(model, MemoryGuard(limit, memory, clock=clock, report=lines.append), store=store)
    assert max(measured) <= limit, "more than the process may have"
    assert lines
    assert bounded.said == free.said
    assert min(free.cached[AGENTS:]) >= TOKENS, "without a limit all are reused"
    assert sum(bounded.cached) < sum(free.cached), "the limit was none: the caches fit into it"


def _held(store: MemoryStore) -> int:
    """Bytes of MLX's arrays and of the store's bodies."""
    [tier] = store.stats()
    return mx.get_active_memory() + mx.get_cache_memory() + tier.n_bytes


def test_what_an_unloaded_model_took_is_the_systems_again() -> None:
    in_own_process("tests.integration.test_memory_guard:between_what_is_in_use")


def between_what_is_in_use() -> None:
    """Memory between objects that stay is returned too: models come and go beside bodies."""
    bodies = [bytes(BODY) for _ in range(N_BODIES)]
    stay = bodies[::50]
    del bodies
    before = memory_in_use()
    free_memory()
    assert before - memory_in_use() > BODY * N_BODIES // 2
    assert len(stay) == N_BODIES // 50


def test_narrow_chunks_and_a_narrow_batch_change_no_token() -> None:
    model, agents = wide_llama(), examples(4, thorough=AGENTS)
    free = run(model, None, agents=agents)
    memory = Memory(lambda: 0, lambda: None)
    clock = partial(next, iter([0.0, 0.0, *[-1.0] * (1 << 20)]))  # never measures
    narrow = MemoryGuard(1 << 40, memory, clock=clock, report=lambda _: None)
    assert run(model, narrow, times=5, agents=agents).said == free.said
    assert narrow.chunks.times == 5


@pytest.mark.parametrize("cuda", [False, True])
def test_a_limit_of_device_memory_costs_no_blocks_in_the_hosts(
    cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "on_cuda", lambda: cuda)
    memory = Memory(lambda: 0, lambda: None)
    guard = MemoryGuard(1 << 30, memory, clock=lambda: 0.0, report=lambda _: None)
    give_up_under_pressure(StepLoop(guard=guard), MemoryStore(1 << 20))
    names = [name for name, _ in guard._order]
    assert names == (["idle caches"] if cuda else ["the memory tier", "idle caches"])
