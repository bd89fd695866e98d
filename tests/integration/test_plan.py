"""The plan's integration and failure-mode tests, with its names, on the real library.

The plan used SmolLM2, as `tests/real` does; here the embedded model takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import mlx.core as mx
import pytest
from mlx_lm import generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

from semantic import BlockPool, BlockPoolBatchEngine, ModelCacheSpec, load
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer
from semantic.domain.errors import (
    CacheReconstructionError,
    InvalidRequestError,
    ModelNotFoundError,
    PoolExhaustedError,
)
from tests.support.pools import available
from tests.support.rig import Rig

Engine = BlockPoolBatchEngine


@pytest.fixture(scope="module")
def loaded() -> tuple[MLXBackend, MLXTokenizer]:
    return load()


@pytest.fixture
def spec(loaded: tuple[MLXBackend, MLXTokenizer]) -> ModelCacheSpec:
    return ModelCacheSpec.from_model(loaded[0])


@pytest.fixture
def pool(spec: ModelCacheSpec) -> BlockPool:
    return BlockPool(spec, total_blocks=500)


@pytest.fixture
def engine(
    loaded: tuple[MLXBackend, MLXTokenizer], pool: BlockPool, spec: ModelCacheSpec
) -> Iterator[Engine]:
    model, tokenizer = loaded
    engine = BlockPoolBatchEngine(model, tokenizer, pool, spec)
    yield engine
    for _ in engine.step():  # leave nothing behind in the shared model
        pass


def reference(loaded: tuple[MLXBackend, MLXTokenizer], prompt: str, max_tokens: int) -> str:
    model, tokenizer = loaded
    inner = cast(TokenizerWrapper, tokenizer.inner)
    return generate(model.model, inner, prompt, max_tokens=max_tokens)


# The six integration tests


def test_single_agent_output_matches_reference(
    loaded: tuple[MLXBackend, MLXTokenizer], engine: Engine
) -> None:
    prompt = "<|user|>My name is Ada. I live in Oslo.<|end|><|assistant|>"
    uid = engine.submit("agent_1", prompt, cache=None, max_tokens=50)
    result = None
    for completion in engine.step():
        if completion.uid == uid:
            result = completion.text
            break
    assert result == reference(loaded, prompt, 50)
    assert result


def test_single_agent_with_cache_resume(
    loaded: tuple[MLXBackend, MLXTokenizer], engine: Engine
) -> None:
    first = "<|user|>My name is Ada. I live in Oslo.<|end|><|assistant|>"
    engine.submit("agent_1", first, max_tokens=50)
    (done,) = engine.step()
    second = first + done.text + "<|end|><|user|>Where do I live?<|end|><|assistant|>"
    uid = engine.submit("agent_1", second, cache=done.blocks, max_tokens=50)
    (resumed,) = engine.step()
    assert resumed.uid == uid
    assert resumed.text == reference(loaded, second, 50)
    assert "Oslo" in resumed.text
    assert resumed.cached_tokens == done.prompt_tokens + done.generated_tokens


def test_three_agents_variable_length(
    loaded: tuple[MLXBackend, MLXTokenizer], engine: Engine
) -> None:
    agents = [
        ("agent_a", "<|user|>Hello<|end|><|assistant|>", 500),
        ("agent_b", "<|user|>My pet is a cat. " * 40 + "<|end|><|assistant|>", 400),
        ("agent_c", "<|user|>What is 2 plus 3?<|end|><|assistant|>", 120),
    ]
    for agent_id, prompt, max_tokens in agents:
        engine.submit(agent_id, prompt, max_tokens=max_tokens)
    completions = {}
    for completion in engine.step():
        completions[completion.agent_id] = completion
        if len(completions) == 3:
            break
    assert all(c.finish_reason == "stop" for c in completions.values())
    for agent_id, prompt, max_tokens in agents:
        assert completions[agent_id].text == reference(loaded, prompt, max_tokens)


def test_ten_generations_leave_the_pool_as_it_was(engine: Engine, pool: BlockPool) -> None:
    free = available(pool)
    for i in range(10):
        engine.submit(f"agent_{i}", "<|user|>Hello<|end|><|assistant|>", max_tokens=20)
    assert len(list(engine.step())) == 10
    for i in range(10):
        assert engine.forget(f"agent_{i}")
    assert available(pool) == free


def test_submit_reserves_the_blocks_of_the_prompt(
    engine: Engine, pool: BlockPool, spec: ModelCacheSpec
) -> None:
    engine.submit("agent_1", [5] * 600, max_tokens=10)
    assert pool.view("agent_1").blocks_per_layer == (3,) * spec.n_layers


def test_decoding_takes_a_block_at_each_boundary() -> None:
    rig = Rig("llama")
    rig.engine.submit("agent_1", [5] * 250, max_tokens=270)
    counts = set()
    while rig.engine.has_work:
        rig.engine.step_once()
        counts.add(rig.pool.view("agent_1").blocks_per_layer[0])
    assert counts == {1, 2, 3}


def test_empty_prompt_is_rejected(engine: Engine, pool: BlockPool) -> None:
    empties: tuple[str | list[int], ...] = ("", [])
    for empty in empties:
        with pytest.raises(InvalidRequestError, match="prompt must not be empty"):
            engine.submit("agent_1", empty)
    assert not engine.has_work
    assert pool.used_blocks == 0


# Failure modes


def test_pool_exhaustion_is_refused_before_any_work(
    loaded: tuple[MLXBackend, MLXTokenizer], spec: ModelCacheSpec
) -> None:
    model, tokenizer = loaded
    pool: BlockPool = BlockPool(spec, total_blocks=10)
    for i in range(10):
        pool.allocate(n_blocks=1, layer_id=0, agent_id=f"blocker_{i}")
    engine = BlockPoolBatchEngine(model, tokenizer, pool, spec)
    with pytest.raises(ValueError, match=r"^Cannot allocate .*blocks"):
        engine.submit("agent_new", "Hello", max_tokens=256)
    with pytest.raises(PoolExhaustedError):
        engine.submit("agent_new", "Hello", max_tokens=256)
    assert not engine.has_work


@pytest.mark.process
def test_concurrent_requests_to_one_agent_neither_deadlock_nor_mix(engine: Engine) -> None:
    uids: list[str] = []

    def ask() -> None:
        prompt = "<|user|>Hi<|end|><|assistant|>"
        uids.extend(engine.submit("agent_1", prompt, max_tokens=8) for _ in range(5))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    done = []
    while any(thread.is_alive() for thread in threads) or engine.has_work:
        done += list(engine.step())
    for thread in threads:
        thread.join()
    done += list(engine.step())
    assert sorted(end.uid for end in done) == sorted(uids)
    assert len({end.tokens for end in done}) == 1


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_max_tokens_must_be_positive(engine: Engine, max_tokens: int) -> None:
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 1"):
        engine.submit("agent_1", "Hello", max_tokens=max_tokens)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ModelNotFoundError, match="no model folder 'nowhere'"):
        load("nowhere")


def test_a_cache_of_another_model_is_refused(engine: Engine, pool: BlockPool) -> None:
    foreign = Rig("llama").answer("ann", [1, 2, 3], 2)
    with pytest.raises(CacheReconstructionError, match="tiny:llama"):
        engine.submit("agent_1", "Hello", cache=foreign.blocks)
    assert not engine.has_work
    assert pool.used_blocks == 0


def test_a_request_longer_than_the_pool_is_refused_while_others_go_on() -> None:
    rig = Rig("llama", columns=3)
    uid = rig.engine.submit("small", [1] * 100, max_tokens=20)
    with pytest.raises(PoolExhaustedError, match="Cannot allocate 12 blocks"):
        rig.engine.submit("large", [1] * 700, max_tokens=200)
    assert rig.run()[uid].finish_reason == "length"
    rig.check()


def test_a_failing_row_is_reported_and_the_engine_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("llama", chunk=64)
    uid = rig.engine.submit("ann", [1] * 100, max_tokens=20)
    rig.engine.step_once()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("[metal::malloc] out of memory")

    monkeypatch.setattr(rig.backend._prefill, "_model", broken)
    done = rig.run()[uid]
    assert done.finish_reason == "error"
    assert done.error == "[metal::malloc] out of memory"
    monkeypatch.undo()
    rig.check()
    assert rig.pool.used_blocks == 0
    assert rig.answer("ann", [1] * 100, 5).finish_reason == "length"


def test_a_step_that_fails_while_decoding_loses_only_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig("llama")
    kept = rig.answer("idle", [1] * 300, 5)
    uids = [rig.engine.submit(agent, [2] * 50, max_tokens=50) for agent in ("ann", "bob")]
    for _ in range(4):
        rig.engine.step_once()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(rig.backend._batch, "step", broken)
    done = rig.run()
    assert [done[uid].finish_reason for uid in uids] == ["error", "error"]
    rig.check()
    assert kept.blocks is not None
    again = rig.answer("idle", [*kept.blocks.token_ids, 4], 5)
    assert again.cached_tokens == 305


def test_plan_names_of_the_gather_experiment_work(spec: ModelCacheSpec) -> None:
    from semantic.domain.entities import AgentBlocks

    pool: BlockPool = BlockPool(spec=spec, total_blocks=1000)
    agent_blocks: AgentBlocks = AgentBlocks(agent_id="test_agent", total_tokens=2048)
    for layer_id in range(spec.n_layers):
        n_blocks = 8 if spec.layer_types[layer_id] == "global" else 4
        for block in pool.allocate(n_blocks, layer_id, "test_agent"):
            agent_blocks.add_block(block)
    assert len(agent_blocks.blocks_for_layer(0)) == 8
    assert pool.used_bytes == spec.bytes_for(2048)


def test_a_bare_mlx_lm_model_has_the_same_spec(loaded: tuple[MLXBackend, MLXTokenizer]) -> None:
    model, _ = loaded
    assert ModelCacheSpec.from_model(model.model) == ModelCacheSpec.from_model(model)
    with pytest.raises(InvalidRequestError, match="expected a loaded model"):
        ModelCacheSpec.from_model(mx.zeros((1,)))
