"""What we rely on inside mlx-lm, checked loudly: this file fails first when mlx-lm changes."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path

import mlx_lm.models
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models import base, cache, llama

from semantic.adapters.mlx import ragged_attention
from semantic.adapters.mlx.ragged_batch import RaggedBatch
from semantic.adapters.mlx.sequence_cache import SequenceCache
from tests.support.tiny_models import tiny_model


def test_the_versions_are_the_ones_this_was_read_from() -> None:
    assert version("mlx-lm").startswith("0.32.")
    assert version("mlx").startswith("0.32.")


def test_attention_takes_the_parameters_that_our_hook_passes_on() -> None:
    theirs = inspect.signature(ragged_attention._mlx_lm_attention).parameters
    assert list(theirs) == ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
    ours = inspect.signature(ragged_attention.scaled_dot_product_attention).parameters
    assert list(ours) == list(theirs)


def test_models_import_attention_by_the_name_that_is_hooked() -> None:
    assert base.scaled_dot_product_attention is ragged_attention._mlx_lm_attention
    ragged_attention.install(tiny_model("llama"))
    hooked = getattr(llama, ragged_attention.HOOKED_NAME)
    assert hooked is ragged_attention.scaled_dot_product_attention
    folder = Path(mlx_lm.models.__file__ or "").parent
    users = [f for f in folder.glob("*.py") if ragged_attention.HOOKED_NAME in f.read_text()]
    assert len(users) > 100


def test_a_batch_calls_nothing_of_a_cache_that_ours_does_not_have() -> None:
    source = "".join(
        inspect.getsource(part) for part in (PromptProcessingBatch, GenerationBatch, BatchGenerator)
    )
    for name in ("merge", "extend", "filter", "extract", "prepare", "finalize", "state", "nbytes"):
        has_it = SequenceCache if name == "merge" else RaggedBatch
        assert hasattr(has_it, name), name
    for call in ("c.filter(", "c.extract(", "c.prepare(", "c.finalize(", "c.state", "c.nbytes"):
        assert call in source, call
    known = {"filter", "extract", "prepare", "finalize", "state", "nbytes"}
    import re

    assert set(re.findall(r"\bc\.(\w+)", source)) <= known


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
