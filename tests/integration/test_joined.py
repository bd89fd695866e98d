"""A model with joined products computes what the model does; the model itself is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from semantic.adapters.mlx.kv_cache.attention_hook import install
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import page_kinds
from semantic.adapters.mlx.kv_cache.probe import LogitsProbe, _Padded
from semantic.adapters.mlx.kv_cache.spec_reader import read_shapes, read_spec
from semantic.adapters.mlx.model import short_steps
from semantic.adapters.mlx.model.joined import JOINED, MOST_ROWS, Product, join, product_of
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.adapters.mlx.model.short_steps import shorten
from tests.support.lanes import more
from tests.support.one_batch import said_by
from tests.support.rounding import most_rounding
from tests.support.tiny_models import ARCHITECTURES, VOCAB, build, randomize, tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def fresh(name: str) -> Module:
    """A model of its own: joining makes views of its weights."""
    model = build(name)
    if name != "quantized":
        randomize(model)
    mx.eval(parameters(model))
    return model


def apart(one: mx.array, other: mx.array) -> float:
    return cast(float, mx.abs(one - other).max().item())


def parameters(model: Module) -> dict[str, object]:
    return cast("Callable[[], dict[str, object]]", model.parameters)()


def weights(model: Module) -> dict[str, mx.array]:
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(parameters(model))))


def logits(model: Module, rows: int = 3) -> mx.array:
    """Of a prompt and of four tokens after it, one by one."""
    caches = make_prompt_cache(model)
    found = [model(mx.array([PROMPT] * rows), cache=caches)]
    for token in (7, 2, 11, 5):
        given = [[(token + row) % VOCAB] for row in range(rows)]
        found.append(model(mx.array(given), cache=caches))
    return mx.concatenate(found, axis=1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_the_same_up_to_rounding(name: str) -> None:
    model = fresh(name)
    before = logits(model)
    ours = logits(join(model))
    limit = 1e-4 if name == "quantized" else most_rounding(tiny_model(name))
    assert apart(ours, before) <= limit
    assert mx.array_equal(logits(model), before)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_shared_and_the_models_own_are_the_same_bits(name: str) -> None:
    model = fresh(name)
    before = tree_map(mx.array, parameters(model))
    mx.eval(before)
    mx.clear_cache()
    active = mx.get_active_memory()
    ours = join(model)
    assert mx.get_active_memory() - active < 4096
    kept = dict(cast("list[tuple[str, mx.array]]", tree_flatten(before)))
    for found in (weights(model), weights(ours)):
        assert found.keys() == kept.keys()
        assert all(mx.array_equal(found[path], kept[path]) for path in kept)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_batch_with_joined_products_passes_the_probe(name: str) -> None:
    model = fresh(name)
    assert LogitsProbe(model, join(model)).accepts(_Padded(model))


def products(model: Module) -> Iterator[tuple[str, ...]]:
    for module in cast("Callable[[], list[Module]]", model.modules)():
        for names in JOINED:
            if all(name in module and product_of(module[name]) for name in names):
                yield names


@pytest.mark.parametrize(
    ("name", "attentions", "mlps"),
    [("llama", 3, 3), ("qwen2", 2, 2), ("qwen3", 2, 2), ("gemma3", 4, 4), ("gpt_oss", 4, 0),
     ("moe", 2, 2), ("quantized", 2, 2)],
)  # fmt: skip
def test_what_reads_one_input_is_joined(name: str, attentions: int, mlps: int) -> None:
    found = list(products(join(fresh(name))))
    assert found.count(JOINED[0]) == attentions
    assert found.count(JOINED[1]) == mlps


class Counts:
    """Counts the calls of products."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = 0
        call = Product.__call__

        def counted(product: Product, x: mx.array) -> mx.array:
            self.n += 1
            return call(product, x)

        monkeypatch.setattr(Product, "__call__", counted)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_decode_step_computes_each_product_once(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ours = join(fresh(name))
    caches = make_prompt_cache(ours)
    calls = Counts(monkeypatch)
    ours(mx.array([[1]] * 4), cache=caches)
    layers = len(caches)
    assert calls.n == 2 * layers


def test_many_tokens_are_computed_by_the_layers_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = join(fresh("llama"))
    calls = Counts(monkeypatch)
    ours(mx.zeros((1, MOST_ROWS + 1), mx.int32), cache=make_prompt_cache(ours))
    assert calls.n == 0


def test_other_inputs_are_not_taken_for_the_same() -> None:
    model = fresh("qwen3")
    ours = join(model)
    theirs = cast(Linear, model.layers[0].self_attn.q_proj)
    mine = ours.layers[0].self_attn
    a, b = mx.random.normal((2, 1, 32)), mx.random.normal((2, 1, 32))
    assert mx.allclose(mine.q_proj(a), theirs(a))
    assert mx.allclose(mine.q_proj(b), theirs(b))
    assert mx.allclose(mine.q_proj(b), theirs(b))  # a second time
    assert mx.allclose(mine.k_proj(b), model.layers[0].self_attn.k_proj(b))
    assert mx.allclose(mine.v_proj(a), model.layers[0].self_attn.v_proj(a))


def test_layers_that_turn_out_to_have_several_inputs_compute_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = join(fresh("qwen3")).layers[0].self_attn
    calls = Counts(monkeypatch)
    for _ in range(3):
        a, b = mx.random.normal((2, 1, 32)), mx.random.normal((2, 1, 32))
        for layer, x in ((mine.q_proj, a), (mine.k_proj, b), (mine.v_proj, b)):
            assert mx.allclose(layer(x), x @ layer.weight.T, atol=1e-5)
    assert calls.n == 1


def test_layers_of_other_types_are_not_joined() -> None:
    model = fresh("qwen3")
    attention = model.layers[0].self_attn
    attention.k_proj = Linear(32, 32, bias=True)
    assert list(products(join(model))).count(JOINED[0]) == 1


def test_what_ties_modules_together_ties_the_copies() -> None:
    model = fresh("llama")
    model.again = model.layers[0]
    ours = join(model)
    assert ours.again is ours.layers[0]
    assert ours.again is not model.layers[0]


# Llama's decode step


def shortened(model: Module, *, add_in_product: bool = True, compiled: bool = True) -> Module:
    ours = join(model)
    shorten(ours, add_in_product=add_in_product, compiled=compiled)
    return ours


def batch_logits(model: Module, caches: Callable[[Module], list[list[object]]]) -> mx.array:
    """Of four steps of a batch, each row after a prompt of its own length."""
    prompts = (PROMPT, PROMPT[:3], PROMPT[:5], PROMPT[2:])  # as many as a batch is padded to
    rows = []
    for own, prompt in zip(caches(model), prompts, strict=True):
        model(mx.array([prompt]), cache=own)
        rows.append(own)
    batch = [layer[0].merge(layer) for layer in zip(*rows, strict=True)]
    steps = ((7, 2, 11, 4), (5, 5, 1, 8), (1, 0, 9, 2), (3, 3, 3, 3))
    return mx.concatenate([model(mx.array(step)[:, None], cache=batch) for step in steps], axis=1)


def padded(model: Module) -> list[list[object]]:
    return [make_prompt_cache(model) for _ in range(4)]


def in_pages(model: Module) -> list[list[object]]:
    spec, shapes = read_spec(model), read_shapes(model)
    assert spec is not None
    kinds = page_kinds(spec, shapes)
    assert kinds is not None
    install(model)
    layers = PagedLayers(spec, kinds, [PortableAttention() for _ in kinds])
    return [cast("list[object]", layers.empty(256)) for _ in range(4)]


@pytest.mark.parametrize("name", ["llama", "gemma3", *more("qwen3")])
@pytest.mark.parametrize("caches", [padded, in_pages])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("add_in_product", [False, True])
def test_a_shortened_step_computes_the_same(
    name: str, caches: Callable[[Module], list[list[object]]], compiled: bool, add_in_product: bool
) -> None:
    model = fresh(name)
    ours = shortened(model, compiled=compiled, add_in_product=add_in_product)
    difference = apart(batch_logits(ours, caches), batch_logits(model, caches))
    assert difference <= most_rounding(tiny_model(name))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "quantized"])
def test_alone_and_in_prompts_it_computes_the_same(name: str) -> None:
    model = fresh(name)
    limit = 1e-4 if name == "quantized" else most_rounding(tiny_model(name))
    ours = shortened(model)
    assert apart(logits(ours), logits(model)) <= limit
    assert apart(batch_logits(ours, padded), batch_logits(model, padded)) <= limit


@pytest.mark.parametrize("name", ["moe", "gpt_oss"])
def test_other_models_are_not_taken_for_llama(name: str) -> None:
    ours = join(fresh(name))
    inner = type(ours.model)
    shorten(ours)
    assert type(ours.model) is inner


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_models_are_written_as_this_was_written_after(name: str) -> None:
    (module,) = (one for one in short_steps.SOURCES if name in one.__name__)
    assert short_steps.source_digest(module) == short_steps.SOURCES[module]
    assert isinstance(shortened(fresh(name)).model, short_steps._Stepped)


def test_if_one_is_not_its_steps_are_not_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(short_steps.SOURCES, llama, "another")
    model = fresh("llama")
    assert type(shortened(model).model) is type(model.model)


def test_a_model_gets_one_form_however_often_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    model = fresh("llama")
    assert short_steps.shorten_here(model) is short_steps.shorten_here(model)
    assert short_steps.shorten_here(fresh("llama")) is not short_steps.shorten_here(model)


def test_a_shortened_step_computes_each_product_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shortened(fresh("llama"), compiled=False)
    calls = Counts(monkeypatch)
    batch_logits(ours, padded)
    assert calls.n == (4 + 4) * 2 * 3  # four prompts and four steps of three layers


def test_on_a_cpu_the_model_itself_decodes() -> None:
    if mx.default_device() == mx.Device(mx.cpu):
        model = fresh("llama")
        assert wrap_model(model).model is model


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "quantized"])
def test_a_backend_in_pages_decodes_the_same_tokens_with_a_shortened_model(name: str) -> None:
    model = fresh(name)

    def answers(decoding: Callable[[Module], Module]) -> list[list[int]]:
        backend = wrap_model(model, attention=lambda _: PortableAttention(), decoding=decoding)
        assert backend.in_pages
        prompts = [[1 + row, *PROMPT[: 2 + 3 * row]] for row in range(3)]
        return [[one.token for one in said] for said in said_by(backend, prompts, 12, top=0)]

    assert answers(shortened) == answers(lambda model: model)


def test_a_form_that_computes_something_else_is_not_used() -> None:
    model = fresh("llama")

    def wrong(model: Module) -> Module:
        ours = join(model)
        ours.model.norm.weight = ours.model.norm.weight * mx.arange(32)
        return ours

    backend = wrap_model(model, attention=lambda _: PortableAttention(), decoding=wrong)
    assert backend.in_pages
    assert backend.model is model
