"""What we rely on inside mlx-lm, checked loudly: this file fails first when mlx-lm changes."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx_lm.models
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models import base, cache, deepseek_v3, deepseek_v32, gated_delta, llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from semantic.adapters.mlx.cuda import gated_delta as kernel
from semantic.adapters.mlx.cuda.gated_delta import Rule
from semantic.adapters.mlx.kv_cache import attention_hook
from semantic.adapters.mlx.kv_cache.contiguous.cache import RaggedBatch, SequenceCache
from semantic.adapters.mlx.kv_cache.contiguous.ragged_array import ROW_BY_ROW, RaggedArray
from semantic.adapters.mlx.kv_cache.paged.cache import RopeKeys, RopeScores
from tests.support.text_tokenizer import text_tokenizer
from tests.support.tiny_models import VOCAB, tiny_model


def test_the_versions_are_the_ones_this_was_read_from() -> None:
    assert version("mlx-lm").startswith("0.32.")
    assert version("mlx").startswith("0.32.")


@pytest.mark.process
@pytest.mark.parametrize("limits", [(1024, 8192), (256, 512)], ids=str)
def test_importing_mlx_lm_lowers_no_limit_of_open_files(limits: tuple[int, int]) -> None:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        "import semantic.adapters.mlx, mlx_lm.utils\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    soft, hard = limits
    assert printed.splitlines()[-2:] == [f"{max(soft, min(2048, hard))} {hard}", "200 300"]


def test_attention_takes_the_parameters_that_our_hook_passes_on() -> None:
    theirs = inspect.signature(attention_hook._mlx_lm_attention).parameters
    assert list(theirs) == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    ours = inspect.signature(attention_hook.scaled_dot_product_attention).parameters
    assert list(ours) == list(theirs)


def test_models_import_attention_by_the_name_that_is_hooked() -> None:
    assert base.scaled_dot_product_attention is attention_hook._mlx_lm_attention
    attention_hook.install(tiny_model("llama"))
    hooked = getattr(llama, attention_hook.HOOKED_NAME)
    assert hooked is attention_hook.scaled_dot_product_attention
    folder = Path(mlx_lm.models.__file__ or "").parent
    users = [f for f in folder.glob("*.py") if attention_hook.HOOKED_NAME in f.read_text()]
    assert len(users) > 100


def test_a_batch_calls_nothing_of_a_cache_that_ours_does_not_have() -> None:
    source = "".join(
        inspect.getsource(part) for part in (PromptProcessingBatch, GenerationBatch, BatchGenerator)
    )
    for name in ("merge", "extend", "filter", "extract", "state", "nbytes"):
        has_it = SequenceCache if name == "merge" else RaggedBatch
        assert hasattr(has_it, name), name
    for call in ("c.filter(", "c.extract(", "c.prepare(", "c.finalize(", "c.state", "c.nbytes"):
        assert call in source, call
    known = {"filter", "extract", "prepare", "finalize", "state", "nbytes"}
    import re

    assert set(re.findall(r"\bc\.(\w+)", source)) <= known
    # Both are for the tokens of prompts, which are padded: a sequence that joins has one token.
    prompt = inspect.getsource(PromptProcessingBatch.prompt)
    for call in ("c.prepare(", "c.finalize("):
        assert source.count(call) == prompt.count(call) == 1


def test_the_generator_is_called_as_it_wants_to_be() -> None:
    insert = inspect.signature(BatchGenerator.insert).parameters
    assert {
        "prompts",
        "max_tokens",
        "caches",
        "all_tokens",
        "samplers",
        "logits_processors",
    } <= insert.keys()
    remove = inspect.signature(BatchGenerator.remove).parameters
    assert {"uids", "return_prompt_caches"} <= remove.keys()
    fields = GenerationBatch.Response.__dataclass_fields__
    assert {"uid", "token", "logprobs"} <= fields.keys()


def test_caches_have_the_fields_that_tell_their_kind() -> None:
    window = cache.RotatingKVCache(max_size=8)
    assert (window.max_size, window.keep) == (8, 0)
    assert cache.KVCache.step == 256


def test_a_padded_cache_has_the_state_that_rows_are_put_into_and_taken_from() -> None:
    keys = mx.arange(2 * 6, dtype=mx.float32).reshape(2, 1, 6, 1)
    batch = cache.BatchKVCache([2, 0])
    batch.state = (keys, -keys, mx.array([1, 3]), mx.array([2, 0]), 3)
    new = mx.array([100.0, 200.0]).reshape(2, 1, 1, 1)
    k, v = batch.update_and_fetch(new, -new)
    # In the next column of all rows, in arrays as large as they were.
    assert k[:, 0, :, 0].tolist() == [[0, 1, 2, 100], [6, 7, 8, 200]]
    assert mx.array_equal(v, -k)
    held, _, positions, paddings, columns = batch.state
    assert held.shape == keys.shape
    assert positions.tolist() == batch.offset.tolist() == [2, 4]
    assert (paddings.tolist(), columns) == ([2, 0], 4)
    mask = batch.make_mask(1, return_array=False, window_size=None)
    assert mask.reshape(2, 5).tolist() == [[False, False, True, True, True], [True] * 5]


def test_a_processor_is_called_once_for_each_token_with_all_tokens_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(cast("list[int]", tokens.tolist()))
        assert logits.shape == (1, VOCAB)
        return logits

    def prompt(_: object, tokens: Sequence[object]) -> None:
        assert not tokens, "one token is no prompt, which would be padded beside longer ones"

    monkeypatch.setattr(PromptProcessingBatch, "prompt", prompt)
    model = tiny_model("llama")
    generator = BatchGenerator(model, max_tokens=100)
    with mx.stream(generator.stream):
        caches = cache.make_prompt_cache(model)
        model(mx.array([[5, 6, 7]]), cache=caches)
        (uid,) = generator.insert(
            [[8]], caches=[caches], all_tokens=[[5, 6, 7]], logits_processors=[[watch]]
        )
        said: list[int] = []
        while len(said) < 4:
            said += [response.token for response in generator.next()[1]]
        generator.remove([uid])
    # One step ahead: the call for the token after the last one was made already.
    assert calls == [[5, 6, 7, 8, *said[:n]] for n in range(5)]


def test_the_tokenizer_is_wrapped_under_the_name_we_unwrap() -> None:
    wrapper = text_tokenizer().inner
    assert isinstance(wrapper, TokenizerWrapper)
    assert isinstance(wrapper._tokenizer, PreTrainedTokenizerFast)


def test_masks_are_bits_of_token_ids_in_order_that_end_tokens_close() -> None:
    assert version("llguidance").startswith("1.9.")
    texts = text_tokenizer()
    inner = cast(TokenizerWrapper, texts.inner)._tokenizer
    trie = from_tokenizer(inner, n_vocab=200, eos_token=[95, 7])
    matcher = LLMatcher(trie, LLMatcher.grammar_from_lark("start: /[ab]/"), log_level=0)

    def allowed() -> list[int]:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        return [token for token in range(200) if mask >> token & 1]

    a, b = texts.encode("ab")
    assert allowed() == [a, b]
    assert matcher.consume_token(a)
    assert matcher.is_accepting()
    assert allowed() == [7, 95]
    # A wrong token is an error for good; nothing is raised, and masks go on.
    assert not matcher.consume_token(b)
    assert matcher.is_error()
    assert matcher.get_error()
    matcher.compute_bitmask()


def test_an_operator_of_a_subclass_of_an_array_is_asked_before_mlxs() -> None:
    ragged = RaggedArray([mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 5, 4))], mx.float32)
    found = mx.ones((2, 2, 1, 4)) @ ragged.swapaxes(-1, -2)
    assert isinstance(found, RaggedArray)
    assert [row.shape for row in found.rows] == [(1, 2, 1, 3), (1, 2, 1, 5)]
    # Functions see an array that they cannot broadcast with, and fail.
    with pytest.raises(ValueError, match="broadcast"):
        mx.add(ragged, mx.ones((2, 1, 5, 4)))


def test_the_product_with_rope_keys_in_pages_is_left_to_attention() -> None:
    queries = mx.ones((2, 2, 1, 4))
    product = queries @ RopeKeys(mx.float32)
    assert isinstance(product, RopeScores)
    assert product.queries is queries
    with pytest.raises(TypeError):
        mx.softmax(cast(mx.array, product))


def test_latent_attention_computes_with_what_its_cache_returns_as_ours_allows() -> None:
    source = inspect.getsource(deepseek_v3.DeepseekV3Attention)
    assert "kv_latent, k_pe = cache.update_and_fetch(kv_latent, k_pe)" in source
    assert "@ k_pe.swapaxes(-1, -2)" in source
    assert "mask=pe_scores" in source


def test_parts_that_are_computed_row_by_row_are_called_as_ours_are() -> None:
    parts = {
        f"{kind}.{name}": list(
            inspect.signature(
                getattr(getattr(importlib.import_module(module), kind), name)
            ).parameters
        )[1:]
        for module, kind, name in attention_hook.PARTS
    }
    assert parts == {
        "DeepseekV32Attention.__call__": ["x", "mask", "cache"],
        "DynamicNTKScalingRoPE.__call__": ["x", "offset"],
        "Indexer.__call__": ["x", "qr", "mask", "cache"],
        "Attention._block_mask": ["x", "mask", "offset", "cache"],
    }


def test_an_indexer_chooses_after_the_latents_were_fetched_and_none_means_all() -> None:
    source = inspect.getsource(inspect.unwrap(deepseek_v32.DeepseekV32Attention.__call__))
    fetched = source.index("kv_latent, k_pe = cache[0].update_and_fetch(kv_latent, k_pe)")
    chosen = source.index("topk_indices = self.indexer(x, qr, mask, cache=cache[1])")
    assert fetched < chosen < source.index("if topk_indices is not None:")


def test_functions_of_rows_take_what_mlxs_take_and_give_the_same() -> None:
    whole = mx.random.normal((2, 1, 3, 4), key=mx.random.key(0))
    rows = RaggedArray([whole[:1], whole[1:]], mx.float32)

    def scores(keys: mx.array, of: Mapping[str, Callable[..., mx.array]]) -> mx.array:
        wide = of["tile"](of["expand_dims"](keys, 2), [1, 1, 2, 1, 1])
        capped = mx.ones((2, 1, 2, 5, 4)) @ wide.swapaxes(-1, -2) / 3.0
        capped = of["tanh"](capped)
        capped *= 3.0
        return of["softmax"](capped, precise=True, axis=-1) @ of["depends"](wide, [wide])

    functions = {name: getattr(mx, name) for name in ROW_BY_ROW}
    assert mx.allclose(scores(rows, ROW_BY_ROW), scores(whole, functions), atol=1e-6)
    assert mx.allclose(scores(whole, ROW_BY_ROW), scores(whole, functions), atol=1e-6)
    rows = RaggedArray([whole[:1], whole[1:, :, :2]], mx.float32)
    n_rows, heads, lengths, dim = rows.shape
    assert (n_rows, heads, dim) == (2, 1, 4)
    assert cast(mx.array, lengths).tolist() == [3, 2]


def test_the_gated_delta_rule_is_computed_by_the_function_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = inspect.signature(kernel.compute).parameters
    assert list(inspect.signature(gated_delta.gated_delta_ops).parameters) == list(ours)
    given = kernel.random_inputs(Rule(2, 4, 8, 8, mx.float32, mx.float32, vector=False), 2, 5)
    called: list[tuple[object, ...]] = []

    def recorded(*arguments: mx.array) -> tuple[mx.array, mx.array]:
        called.append(arguments)
        return kernel.by_token(*arguments[:6])

    monkeypatch.setattr(gated_delta, kernel.HOOKED_NAME, recorded)
    q, k, v, _, a, state = given
    gated_delta.gated_delta_update(q, k, v, a, a, mx.zeros(4), mx.zeros(4), state)
    ((*_, decay, _, before, mask),) = called
    assert mask is None
    assert before is state
    assert cast(mx.array, decay).dtype == mx.float32
    for name in ("qwen3_next", "qwen3_5", "kimi_linear", "olmo_hybrid"):
        module = importlib.import_module(f"mlx_lm.models.{name}")
        assert module.gated_delta_update is gated_delta.gated_delta_update


@pytest.mark.parametrize("vector", [False, True], ids=["heads", "numbers"])
def test_the_gated_delta_rule_written_out_is_mlx_lms(vector: bool) -> None:
    given = kernel.random_inputs(Rule(2, 4, 16, 8, mx.float32, mx.float32, vector=vector), 2, 9)
    theirs = kernel._operations(*given)
    for found, expected in zip(kernel.by_token(*given), theirs, strict=True):
        assert mx.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_cache_of_a_state_has_the_fields_that_rows_are_gathered_from() -> None:
    state = cache.ArraysCache(2)
    assert set(vars(state)) == {"cache", "left_padding", "lengths"}
    state.advance(1)
    assert state.empty()
    assert state.make_mask(1) is None
