"""Models whose layers keep something else than keys and values, or need mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.decode_batch import ContinuousBatch
from semantic.adapters.mlx.batch.generator_batch import GeneratorBatch
from semantic.adapters.mlx.kv_cache.spec_reader import read_spec
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.errors import UnsupportedModelError
from semantic.domain.value_objects import LayerKind
from tests.integration.test_exactness import prompts
from tests.support.char_tokenizer import CharTokenizer
from tests.support.lanes import THOROUGH, more_rows
from tests.support.reference import is_answer
from tests.support.tiny_models import VOCAB, build, tiny_model


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("recurrent_gemma", "state sliding_window " * 2),
        ("nemotron_h", "state global"),
        ("deepseek_v3", "global " * 2),
        ("mamba", "state " * 2),
        ("rwkv7", "state " * 2),
        *more_rows(
            ("lfm2", "state global state global"),
            ("qwen3_next", "state global"),
            ("kimi_linear", "state global"),
            ("stablelm", "global " * 4),
        ),
    ],
)
def test_all_kinds_of_layers_decode_in_our_batch_and_answers_stay_exact(
    model: str, kinds: str
) -> None:
    built = tiny_model(model)
    backend = wrap_model(built)
    spec = backend.cache_spec()
    assert [kind.value for kind in spec.layer_types] == kinds.split()
    assert all(backend.ragged_layers)
    assert isinstance(backend._batch, ContinuousBatch)
    answers_are_exact_in_two_turns(built, backend)


@pytest.mark.parametrize("model", ["falcon_h1", "glm_moe_dsa", "longcat_flash"])
def test_lists_of_caches_decode_in_our_batch_and_answers_stay_exact(model: str) -> None:
    built = tiny_model(model)
    backend = wrap_model(built)
    assert all(backend.ragged_layers)
    assert isinstance(backend._batch, ContinuousBatch)
    answers_are_exact_in_two_turns(built, backend)


def test_what_our_batch_computes_otherwise_is_padded_by_mlx_lm_and_answers_stay_exact() -> None:
    built = tiny_model("adds to keys")
    backend = wrap_model(built)
    assert not any(backend.ragged_layers)
    assert isinstance(backend._batch, GeneratorBatch)
    answers_are_exact_in_two_turns(built, backend)


def answers_are_exact_in_two_turns(built: Module, backend: MLXBackend) -> None:
    """Prompts of several lengths, two of which have no token to prefill, and their second turns."""
    spec = backend.cache_spec()
    pool: BlockPool = BlockPool(spec, total_blocks=400)
    engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec)
    asked = prompts(1, 5, 257, 1, 700 if THOROUGH else 400, seed=30)
    n_new = 20 if THOROUGH else 8
    for turn in range(2):
        uids = [engine.submit(f"a{i}", p, max_tokens=n_new + i) for i, p in enumerate(asked)]
        done = {end.uid: end for end in engine.step()}
        engine.check_integrity()
        for i, (uid, prompt) in enumerate(zip(uids, asked, strict=True)):
            answer = done[uid].tokens
            assert is_answer(built, prompt, answer, n_new + i)
            assert (done[uid].cached_tokens > 0) == (turn > 0)
            asked[i] = [*prompt, *answer, 1, 2, 3]
    for i in range(len(asked)):
        engine.forget(f"a{i}")
    assert pool.used_blocks == 0


def test_an_edited_prompt_is_computed_anew_where_a_state_cannot_go_back() -> None:
    built = tiny_model("lfm2")
    backend = wrap_model(built)
    spec = backend.cache_spec()
    pool: BlockPool = BlockPool(spec, total_blocks=400)
    engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec)
    (prompt,) = prompts(300, seed=31)
    engine.submit("ann", prompt, max_tokens=10)
    list(engine.step())
    edited = [*prompt[:200], (prompt[200] + 1) % VOCAB, *prompt[201:]]
    engine.submit("ann", edited, max_tokens=10)
    (end,) = engine.step()
    assert end.cached_tokens == 0
    assert is_answer(built, edited, end.tokens, 10)


def test_a_cache_that_cannot_be_kept_is_named() -> None:
    class Nothing:
        """A cache without a state."""

    class Chunked(Module):
        def make_cache(self) -> list[object]:
            return [Nothing()]

        def __call__(self, inputs: mx.array, cache: object = None) -> mx.array:
            del cache
            return inputs

    with pytest.raises(UnsupportedModelError, match="layer 0 keeps a Nothing"):
        read_spec(cast(Callable[[], Module], Chunked)())


def test_reading_a_spec_computes_nothing() -> None:
    before = mx.get_active_memory()
    spec = read_spec(build("lfm2"))
    assert spec is not None
    assert spec.layers[0].kind is LayerKind.STATE
    assert mx.get_active_memory() - before < 4096
