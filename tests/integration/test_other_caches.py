"""Models whose layers keep something else than keys and values, or need mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx_lm.models import cache as mlx_caches

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.kv_cache.spec_reader import read_spec
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.errors import UnsupportedModelError
from semantic.domain.value_objects import LayerKind
from tests.integration.test_exactness import prompts
from tests.support.char_tokenizer import CharTokenizer
from tests.support.reference import is_answer
from tests.support.tiny_models import VOCAB, build, tiny_model


@pytest.mark.parametrize(
    ("model", "kinds", "ragged"),
    [
        ("lfm2", "state global state global", (False, True, False, True)),
        ("recurrent_gemma", "state sliding_window " * 2, (False, True, False, True)),
        ("stablelm", "global " * 4, (False,) * 4),
    ],
)
def test_layers_that_need_it_keep_mlx_lms_caches_and_answers_stay_exact(
    model: str, kinds: str, ragged: tuple[bool, ...]
) -> None:
    built = tiny_model(model)
    backend = wrap_model(built)
    spec = backend.cache_spec()
    assert [kind.value for kind in spec.layer_types] == kinds.split()
    assert backend.ragged_layers == ragged
    pool: BlockPool = BlockPool(spec, total_blocks=400)
    engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec)
    asked = prompts(1, 5, 257, 40, 700, seed=30)
    for turn in range(2):
        uids = [engine.submit(f"a{i}", p, max_tokens=25) for i, p in enumerate(asked)]
        done = {end.uid: end for end in engine.step()}
        engine.check_integrity()
        for i, (uid, prompt) in enumerate(zip(uids, asked, strict=True)):
            answer = done[uid].tokens
            assert is_answer(built, prompt, answer, 25)
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


def test_a_model_that_no_cache_can_batch_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="gemma2 gives other answers in a batch"):
        wrap_model(tiny_model("gemma2"))


def test_an_unknown_kind_of_cache_is_named() -> None:
    class Chunked(Module):
        def make_cache(self) -> list[object]:
            return [mlx_caches.ChunkedKVCache(8)]

        def __call__(self, inputs: mx.array, cache: object = None) -> mx.array:
            del cache
            return inputs

    with pytest.raises(UnsupportedModelError, match="layer 0 keeps a ChunkedKVCache"):
        read_spec(cast(Callable[[], Module], Chunked)())


def test_reading_a_spec_computes_nothing() -> None:
    before = mx.get_active_memory()
    spec = read_spec(build("lfm2"))
    assert spec is not None
    assert spec.layers[0].kind is LayerKind.STATE
    assert mx.get_active_memory() - before < 4096
