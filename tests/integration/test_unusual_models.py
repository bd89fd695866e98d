"""Models whose caches or masks are unlike those of others: each answer is what mlx-lm gives."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import minimax_m3_vl

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.batch.padded_batch import padding_works
from semantic.adapters.mlx.kv_cache import attention_hook, probe
from semantic.adapters.mlx.kv_cache.contiguous.cache import FullCache, KVBuffer, WindowCache
from semantic.adapters.mlx.kv_cache.model_spec import NARROW, narrowed, read_shapes, read_spec
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe, choosing_layers
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.composition.engine_settings import Settings
from semantic.composition.process_stores import open_store
from semantic.domain.value_objects import LayerKind, SamplingParams
from semantic.ports.generation import at_once
from tests.integration.test_exactness import prompts
from tests.support.char_tokenizer import CharTokenizer
from tests.support.lanes import THOROUGH, more_rows
from tests.support.probed import probed_once
from tests.support.reference import is_greedy
from tests.support.rounding import equally_likely
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.unusual_models import UNUSUAL, WINDOW, unusual_model

_NEW = 10 if THOROUGH else 6


def alone(name: str, prompt: list[int], n_new: int = _NEW) -> list[int]:
    """The answer of mlx-lm's own loop, with its own caches."""
    steps = generate_step(mx.array(prompt), unusual_model(name), max_tokens=n_new)
    return [int(token) for token, _ in steps]


def is_right(name: str, prompt: list[int], answer: tuple[int, ...]) -> bool:
    """Whether it is mlx-lm's answer, up to a choice between equally likely tokens.

    mlx-lm decodes its own only if a token is not the likeliest when all are computed at once, and
    in the thorough lane.
    """
    if not THOROUGH and len(answer) == _NEW and is_greedy(unusual_model(name), prompt, answer):
        return True
    for i, (found, expected) in enumerate(zip(answer, alone(name, prompt), strict=True)):
        if found != expected:
            return equally_likely(unusual_model(name), [*prompt, *answer[:i]], (found, expected))
    return True


class Served:
    """An engine on one of the models."""

    def __init__(self, name: str, *, in_pages: bool = False, folder: Path | None = None) -> None:
        """With a `folder`, caches are on disk."""
        attention = (lambda _: PortableAttention()) if in_pages else None
        self.name = name
        with probed_once():
            self.backend: MLXBackend = wrap_model(
                unusual_model(name), f"tiny:{name}", attention=attention
            )
        assert self.backend.in_pages == in_pages
        settings = Settings(use_disk=True, store=folder)
        store = None if folder is None else open_store(settings)
        spec = self.backend.cache_spec()
        pool: BlockPool = BlockPool(spec, total_blocks=800)
        self.engine: BlockPoolBatchEngine = BlockPoolBatchEngine(
            self.backend, CharTokenizer(), pool, spec, store=store
        )

    def answers(self, asked: list[list[int]]) -> list[tuple[tuple[int, ...], int]]:
        """The answers of agents 0, 1, ... at once, and how many tokens of each were cached."""
        uids = [
            self.engine.submit(f"agent-{i}", prompt, max_tokens=_NEW)
            for i, prompt in enumerate(asked)
        ]
        done = {end.uid: end for end in self.engine.step()}
        self.engine.check_integrity()
        return [(done[uid].tokens, done[uid].cached_tokens) for uid in uids]


def converse(served: Served, lengths: tuple[int, ...]) -> list[list[int]]:
    """Turns of several agents at once; how many tokens were cached in each turn."""
    asked = prompts(*lengths, seed=40)
    cached: list[list[int]] = []
    for turn in range(3 if THOROUGH else 2):
        found = served.answers(asked)
        for prompt, (answer, _) in zip(asked, found, strict=True):
            assert is_right(served.name, prompt, answer), (turn, len(prompt))
        cached.append([n for _, n in found])
        asked = [
            [*prompt, *answer, 1, 2, 3] for prompt, (answer, _) in zip(asked, found, strict=True)
        ]
    return cached


@pytest.mark.parametrize(
    ("name", "in_pages"),
    [("mistral3", True), ("smollm3", False), *more_rows(("mistral3", False), ("smollm3", True))],
)
def test_a_window_that_only_the_mask_has(name: str, in_pages: bool) -> None:
    served = Served(name, in_pages=in_pages)
    kinds = [LayerKind.SLIDING_WINDOW, LayerKind.FULL] * 2
    assert list(served.backend.cache_spec().layer_types) == kinds
    windows = [layer.window for layer in served.backend.cache_spec().layers]
    assert windows == [WINDOW, None] * 2
    assert all(served.backend.ragged_layers)
    cached = converse(served, (300, 7, WINDOW + 1, 600))
    assert all(all(n > 0 for n in turn) for turn in cached[1:])
    edited = prompts(300, seed=41)[0]
    served.answers([edited])
    edited[150] = (edited[150] + 1) % VOCAB
    ((answer, _),) = served.answers([edited])
    assert is_right(name, edited, answer)


def test_masks_are_read_without_computing() -> None:
    before = mx.get_active_memory()
    for name, windows, limit in (
        ("mistral3", [WINDOW, None] * 2, None),
        ("gemma2", [None] * 4, None),
        ("plamo3", [WINDOW, None] * 2, WINDOW - 1),
        ("internlm3", [None] * 4, 0),
    ):
        spec = read_spec(unusual_model(name))
        assert spec is not None
        assert [layer.window for layer in spec.layers] == windows, name
        assert spec.reusable_tokens == limit, name
    assert mx.get_active_memory() - before < 1 << 20


def test_what_is_wrong_beyond_a_budget_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = unusual_model("minimax_m3_vl")
    monkeypatch.setattr(attention_hook, "PARTS", {})
    theirs = inspect.unwrap(minimax_m3_vl.Attention._block_mask)
    monkeypatch.setattr(minimax_m3_vl.Attention, "_block_mask", theirs)
    spec, shapes = read_spec(model), read_shapes(model)
    assert spec is not None
    assert at_once(choosing_layers(LogitsProbe(model), spec, shapes)) is None
    monkeypatch.setattr(probe, "narrowed", lambda *_: contextlib.nullcontext(enter_result=False))
    assert at_once(choosing_layers(LogitsProbe(model), spec, shapes)) is not None


def test_a_narrowed_model_is_as_it_was_afterwards() -> None:
    model = unusual_model("plamo3")
    before = read_spec(model)
    with narrowed(model) as changed:
        small = read_spec(model)
        assert changed
        assert small is not None
        assert {layer.window for layer in small.layers if layer.window} == {NARROW}
    assert read_spec(model) == before


LIKE_ANOTHER = {"internlm2": "internlm3", "plamo": "gemma2"}
"""Models that are computed as another is."""


def lane(name: str) -> object:
    """A model, for `make thorough` alone if another is computed as it is."""
    return pytest.param(name, marks=[pytest.mark.thorough] if name in LIKE_ANOTHER else [])


DIVIDED = {"internlm2": 0, "internlm3": 0, "plamo3": WINDOW - 1}
"""Models that compute other keys if a prompt is divided elsewhere, and what can be reused."""


@pytest.mark.parametrize("name", [lane(name) for name in DIVIDED])
def test_where_a_prompt_is_divided_matters_nothing_is_reused(name: str, tmp_path: Path) -> None:
    served = Served(name, folder=tmp_path)
    assert all(served.backend.ragged_layers)
    cached = converse(served, (700, 7, WINDOW + 1, *([2100] if THOROUGH else [])))
    assert all(n <= DIVIDED[name] for turn in cached for n in turn)
    edited = prompts(700 if THOROUGH else 300, seed=41)[0]
    served.answers([edited])
    served.engine.close()
    served = Served(name, folder=tmp_path)
    ((answer, _),) = served.answers([edited])
    assert is_right(name, edited, answer)
    edited[150] = (edited[150] + 1) % VOCAB
    ((answer, _),) = served.answers([edited])
    assert is_right(name, edited, answer)
    served.engine.close()


@pytest.mark.parametrize("name", ["glm_moe_dsa", "minimax_m3_vl"])
def test_index_keys_that_choose_nothing_yet_are_computed_all_the_same(name: str) -> None:
    # No logits depend on them yet: their graph would grow with each token.
    backend = wrap_model(unusual_model(name) if name in UNUSUAL else tiny_model(name))
    for _ in range(2):
        backend.start(backend.open(64), 5, [], SamplingParams(), 0)
    for _ in range(6):
        assert backend.decode()
    for cache in itertools.chain(*backend.sequences()):
        graph = io.StringIO()
        mx.export_to_dot(graph, cast(FullCache, cache).keys)
        assert graph.getvalue().count("SliceUpdate") <= 2


def test_positions_that_depend_on_the_length_are_not_in_pages() -> None:
    backend = wrap_model(unusual_model("internlm3"), attention=lambda _: PortableAttention())
    assert all(backend.ragged_layers)
    assert not backend.in_pages


def test_what_padding_moves_is_not_padded() -> None:
    assert not padding_works(unusual_model("minimax_m3_vl"))
    assert padding_works(tiny_model("glm_moe_dsa"))


def test_layers_that_share_a_cache_share_its_pages() -> None:
    served = Served("gemma3n", in_pages=True)
    cached = converse(served, (300, 7))
    assert all(all(n > 0 for n in turn) for turn in cached[1:])


def test_what_layers_share_is_kept_until_the_cache_is_evaluated() -> None:
    shape = LayerShape(1, 4, 4, mx.float32)
    cache = WindowCache(KVBuffer.empty(shape, 256), 0, 8, 256)
    seen = cache.update_and_fetch(*mx.random.normal((2, 1, 1, 300, 4)))
    assert cache.keys_and_values() == seen
    mx.eval(cache.state)
    with pytest.raises(ValueError, match="no tokens appended"):
        cache.keys_and_values()


def test_before_the_place_where_it_matters_everything_is_reused() -> None:
    served = Served("internlm3+4096")
    assert served.backend.cache_spec().reusable_tokens == 4096
    cached = converse(served, (300, 7))
    assert all(all(n > 0 for n in turn) for turn in cached[1:])


ALONE = ("gpt_bigcode", "llama4", "deepseek_v41")
"""Models that no batch computes: they are served one after the other."""
IN_A_BATCH = ("afm7", "gemma2", "gemma3n", "minimax_m3_vl", "plamo", "plamo2")
"""Models that compute with what their caches return, share them, or choose from them."""


@pytest.mark.parametrize("name", [lane(name) for name in ALONE + IN_A_BATCH])
def test_answers_and_turns_and_restarts_are_exact(name: str, tmp_path: Path) -> None:
    served = Served(name, folder=tmp_path)
    assert served.backend.together == (name in IN_A_BATCH)
    assert all(served.backend.ragged_layers) == (name in IN_A_BATCH)
    lengths = (300, 7, 65, 600) if THOROUGH else (300, 7)
    cached = converse(served, lengths)
    assert all(all(n > 0 for n in turn) for turn in cached[1:])
    edited = prompts(300, seed=41)[0]
    ((answer, _),) = served.answers([edited])
    served.engine.close()
    longer = [*edited, *answer, 3, 2, 1]
    served = Served(name, folder=tmp_path)
    ((answer, n_cached),) = served.answers([longer])
    assert n_cached >= len(longer) - 5
    assert is_right(name, longer, answer)
    edited[150] = (edited[150] + 1) % VOCAB
    ((answer, _),) = served.answers([edited])
    assert is_right(name, edited, answer)
    served.engine.close()
