"""Adapters of mlx-lm on the weights of their base: their answers are mlx-lm's, nothing is loaded
twice, and what mlx-lm changes about them fails here first."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip
import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.tuner import utils as tuner
from mlx_lm.utils import load, load_model, quantize_model

import semantic
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.model.adapter import apply_adapter, read_adapter
from semantic.adapters.mlx.model.joined import join, share
from semantic.adapters.mlx.model.provider import MLXModelProvider, find_folder
from semantic.application.models.on_demand import ManagedModels
from semantic.bootstrap import App, build_engine
from semantic.composition.engine_settings import NamedAdapter, Settings
from semantic.composition.named_models import describe_model, load_tokenizer, parse_adapter
from semantic.domain.answer import Usage
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.ports.serving import ServingPort
from semantic.serve import ServeSettings
from semantic.serve_models import ModelsSettings, load_models
from semantic_server.cli.serve import load_model as load_server
from semantic_server.http.settings import load_settings
from tests.support import asked
from tests.support.adapter_folder import CONFIG, WEIGHTS, write_adapter
from tests.support.model_folder import write_model
from tests.support.reference import generate, is_answer

MIB = 1 << 20
POOL, TIER = 8 * MIB, 64 * MIB
KINDS = ("lora", "dora", "full")
TOKENS = 8
LENGTHS = (300, 41, 7)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", "qwen3_coder")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    """One of each kind, and a second LoRA."""
    found = {kind: write_adapter(base.parent / kind, base, kind) for kind in KINDS}
    other = write_adapter(base.parent / "other", base, rank=2, seed=2, keys=["self_attn.q_proj"])
    return {**found, "other": other}


def prompt_of(n_tokens: int) -> tuple[int, ...]:
    return tuple((i * i * 7 + i) % 500 + 20 for i in range(n_tokens))


def arrays(model: object) -> dict[str, mx.array]:
    parameters = cast("Callable[[], object]", cast(Module, model).parameters)()
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(parameters)))


def app_of(base: Path, adapter: Path, store: Path) -> App:
    return build_engine(
        Settings(
            str(base),
            pool_bytes=POOL,
            use_disk=True,
            store=store,
            disk_bytes=64 * MIB,
            memory_bytes=TIER,
            adapter=NamedAdapter("x", adapter),
        )
    )


# --- what mlx-lm does -------------------------------------------------------------------------


def test_mlx_lm_stores_and_applies_adapters_as_it_is_written_here() -> None:
    """Loud: an adapter that mlx-lm would apply otherwise must not be served."""
    source = inspect.getsource(tuner.load_adapters)
    for part in (
        'adapter_path / "adapter_config.json"',
        'adapter_path / "adapters.safetensors"',
        'getattr(config, "fine_tune_type", "lora")',
        "config.num_layers,\n            config.lora_parameters,",
        'use_dora=(fine_tune_type == "dora")',
        'adapter_leaves = {"lora_a", "lora_b", "m"}',
        "model.load_weights(list(weights.items()), strict=False)",
    ):
        assert part in source, part
    parameters = inspect.signature(tuner.linear_to_lora_layers).parameters
    assert list(parameters) == ["model", "num_layers", "config", "use_dora"]


# --- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_mlx_lm_in_a_batch_from_the_cache_and_after_a_restart(
    base: Path, adapters: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    theirs = cast(Module, load(str(base), adapter_path=str(adapters[kind]))[0])
    plain = cast(Module, load(str(base))[0])
    prompts = [prompt_of(n) for n in LENGTHS]
    assert generate(plain, prompts[0], TOKENS) != generate(theirs, prompts[0], TOKENS)
    more = prompt_of(30)
    for life in range(2):
        app = app_of(base, adapters[kind], tmp_path)
        uids = [app.engine.submit(f"a{i}", one, max_tokens=TOKENS) for i, one in enumerate(prompts)]
        done = {one.uid: one for one in app.engine.step()}
        for number, uid in enumerate(uids):
            assert is_answer(theirs, prompts[number], done[uid].tokens, TOKENS)
            assert (done[uid].cached_tokens > 0) == bool(life)
            prompts[number] = (*prompts[number], *done[uid].tokens, *more)
        app.engine.submit("a0", prompts[0], max_tokens=TOKENS)
        (again,) = app.engine.step()
        assert is_answer(theirs, prompts[0], again.tokens, TOKENS)
        assert again.cached_tokens >= len(prompts[0]) - len(more) - 1
        app.engine.close()


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_on_a_quantized_base_shares_its_weights_and_answers_as_mlx_lm(
    base: Path, tmp_path: Path, kind: str
) -> None:
    folder, (model, config) = shutil.copytree(base, tmp_path / "4bit"), load_model(base)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays(model), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    adapter = write_adapter(tmp_path / kind, folder, kind)
    assert describe_model(folder, adapter=adapter).adapter is not None
    provider = MLXModelProvider()
    plain, adapted = (provider.load_model(str(folder), one)[0] for one in (None, adapter))
    of_base = arrays(plain.model)
    assert {id(one) for one in of_base.values()} < {
        id(one) for one in arrays(adapted.model).values()
    }
    theirs = cast(Module, load(str(folder), adapter_path=str(adapter))[0])
    cast("Callable[[mx.Dtype], object]", theirs.set_dtype)(mx.float32)
    tokens = mx.array([prompt_of(40)])
    assert mx.array_equal(adapted.model(tokens), theirs(tokens))
    assert not mx.array_equal(adapted.model(tokens), plain.model(tokens))


def test_each_adapter_and_each_version_of_it_has_blocks_of_its_own(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    provider = MLXModelProvider()
    changed = shutil.copytree(adapters["lora"], tmp_path / "lora")
    weights = cast("dict[str, mx.array]", mx.load(str(changed / WEIGHTS)))
    name = min(weights)
    mx.save_safetensors(str(changed / WEIGHTS), {**weights, name: weights[name] + 1e-3})
    scaled = shutil.copytree(adapters["lora"], tmp_path / "scaled")
    config = (scaled / CONFIG).read_text(encoding="utf-8")
    (scaled / CONFIG).write_text(config.replace("4.0", "5.0"), encoding="utf-8")
    same = shutil.copytree(adapters["lora"], tmp_path / "same")
    (same / "0000100_adapters.safetensors").write_bytes(b"an earlier state")
    folders = [None, *adapters.values(), changed, scaled]
    ids = [provider.load_model(str(base), one)[0].model_id for one in folders]
    assert len({*ids}) == len(folders)
    assert provider.load_model(str(base), same)[0].model_id == ids[1]


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["base", "adapter"])
def test_the_weights_of_the_base_are_the_very_same_arrays(
    base: Path, adapters: dict[str, Path], first: str
) -> None:
    """In whichever order they are loaded, and after the other one is gone."""
    provider = MLXModelProvider()
    order = [None, adapters["lora"]] if first == "base" else [adapters["lora"], None]
    loaded = [provider.load_model(str(base), one)[0] for one in order]
    found = {one is None: arrays(model.model) for one, model in zip(order, loaded, strict=True)}
    own = {name for name in found[False] if name.rpartition(".")[2] in ("lora_a", "lora_b")}
    of_base = {id(one) for one in found[True].values()}
    assert len(own) == 2 * 2 * 7, "two for each linear layer"
    assert {id(one) for name, one in found[False].items() if name not in own} == of_base
    described = describe_model(base, adapter=adapters["lora"]).adapter
    assert described is not None
    assert described.n_bytes == sum(found[False][name].nbytes for name in own)
    loaded.pop(order.index(None))
    del found
    again = arrays(provider.load_model(str(base))[0].model)
    assert {id(one) for one in again.values()} == of_base


def test_joining_the_layers_of_the_base_keeps_them_one_with_those_of_the_adapter(
    base: Path, adapters: dict[str, Path]
) -> None:
    """As on a GPU, where the base decodes with joined products, of which its arrays are parts."""
    read = cast(Module, load_model(base)[0])
    plain = share(read)
    adapted = apply_adapter(read, read_adapter(adapters["other"]))
    tokens = mx.array([prompt_of(20)])
    before = adapted(tokens)
    mx.eval(before)
    old = arrays(plain)
    join(plain)
    new = arrays(plain)
    parts = [name for name in new if new[name] is not old[name]]
    assert len(parts) == 2 * 5, "queries, keys, values, gate and up of two layers"
    own = {"lora_a", "lora_b"}
    shared = {name: one for name, one in arrays(adapted).items() if name.split(".")[-1] not in own}
    assert {id(one) for one in shared.values()} == {id(one) for one in new.values()}
    assert mx.array_equal(adapted(tokens), before)


def test_a_full_fine_tune_has_its_own_arrays_and_shares_the_others(
    base: Path, adapters: dict[str, Path]
) -> None:
    provider = MLXModelProvider()
    both = [provider.load_model(str(base), one)[0] for one in (None, adapters["full"])]
    plain, tuned = (arrays(one.model) for one in both)
    assert {name for name in plain if plain[name] is not tuned[name]} == {
        name for name in plain if ".mlp." in name
    }
    assert plain.keys() == tuned.keys()


# --- several models ---------------------------------------------------------------------------


def served(base: Path, store: Path, adapter: tuple[str, Path] | None = None) -> ServeSettings:
    engine = Settings(
        str(base),
        pool_bytes=POOL,
        memory_bytes=TIER,
        use_disk=True,
        store=store,
        disk_bytes=64 * MIB,
        adapter=None if adapter is None else NamedAdapter(*adapter),
    )
    if adapter is None:
        return ServeSettings(engine)
    aliases = frozenset({adapter[0]})
    return ServeSettings(engine, (f"base+{adapter[0]}",), aliases, parent="base")


async def ask(serving: ServingPort, prompt: tuple[int, ...]) -> tuple[str, Usage]:
    return await asked.ask(serving, "ann", prompt, TOKENS)


@pytest.mark.process
def test_models_of_one_base_answer_side_by_side_and_their_accounts_are_right(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    names = ("lora", "other", "full")
    prompt = prompt_of(LENGTHS[0])

    def settings() -> ModelsSettings:
        some = [served(base, tmp_path, (one, adapters[one])) for one in names]
        return ModelsSettings([served(base, tmp_path), *some], max_bytes=TIER + 4 * POOL + 4 * MIB)

    def n_bytes(models: ManagedModels) -> dict[str, int]:
        return {one.served.id: one.n_bytes - POOL for one in models.statuses()}

    async def first() -> None:
        models = await load_models(settings())
        weights = n_bytes(models)["base"]
        assert weights == describe_model(base).weights_bytes
        served_now = [None, *names]
        answers = await asyncio.gather(*(ask(models.serving_of(n), prompt) for n in served_now))
        assert len({text for text, _ in answers}) == 4
        assert all(usage.cached == 0 for _, usage in answers), "nothing is shared between them"
        own = n_bytes(models)
        assert own["base"] == weights
        assert 0 < own["base+other"] < own["base+lora"] < weights
        assert 0 < own["base+full"] < weights
        await models.unload("base")
        left = n_bytes(models)
        assert left["base+lora"] == own["base+lora"] + weights, "which hold the weights now"
        assert left["base+other"] == own["base+other"]
        assert left["base"] == 0, "they are there for it"
        assert [one.served.parent for one in models.statuses()] == [None, *["base"] * 3]
        again = await ask(models.serving_of("other"), prompt)
        assert again[0] == answers[2][0]
        before = mx.get_active_memory()
        await models.load("base")
        assert mx.get_active_memory() - before < weights / 2, "the base's weights were kept"
        for name in ("base", *(f"base+{one}" for one in names)):
            await models.unload(name)
        assert before - mx.get_active_memory() > weights / 2
        await models.close()

    async def second() -> None:
        models = await load_models(settings())
        for name in (None, *names):
            _, usage = await ask(models.serving_of(name), (*prompt, *prompt_of(10)))
            assert usage.cached >= len(prompt)
        await models.close()

    asyncio.run(first())
    asyncio.run(second())


@pytest.mark.process
def test_a_program_talks_to_agents_of_a_model_and_of_its_adapters(tmp_path: Path) -> None:
    base = find_folder("semantic-tiny")
    given = {one: write_adapter(tmp_path / one, base, seed=i) for i, one in enumerate(("x", "y"))}
    settings = Settings(pool_bytes=3 * POOL, memory_bytes=TIER, store=tmp_path / "store")
    options: semantic.ChatOptions = {"max_tokens": TOKENS, "temperature": 0}
    models = (None, "x", "semantic-tiny+y")
    requests = [semantic.Request("ada", "Hello!", model=one) for one in models]
    with semantic.Engine(replace(settings, use_disk=True), adapters=given) as engine:
        tiny, *adapted = engine.models
        assert (tiny.id, tiny.parent) == ("semantic-tiny", None)
        assert [one.id for one in adapted] == ["semantic-tiny+x", "semantic-tiny+y"]
        assert {one.parent for one in adapted} == {tiny.id}
        first = engine.run_batch(requests, **options)
        theirs, tokenizer, *_ = load(str(base), adapter_path=str(given["y"]))
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello!"}], add_generation_prompt=True
        )
        text = tokenizer.decode(generate(cast(Module, theirs), prompt, TOKENS))
        assert first[-1].text == text.partition("<|end|>")[0]
        assert len({one.text for one in first}) == 3
        assert [one.cached_tokens for one in first] == [0, 0, 0]
        twin = engine.agent("ada", model="semantic-tiny+x").fork("twin")
        assert twin is not engine.agent("twin")
        assert [one.id for one in engine.agents("x")] == ["twin", "ada"]
        assert [one.id for one in engine.agents()] == ["ada"]
        with pytest.raises(ModelNotFoundError, match=r"this engine has: .*mean semantic-tiny\+x"):
            engine.chat("ada", "Hello!", model="semantic-tiny+xx")
        with pytest.raises(InvalidRequestError, match="'ada' has two requests"):
            engine.run_batch([*requests, semantic.Request("ada", "Bye!", model="semantic-tiny+x")])
        file = tmp_path / "ada.agent"
        engine.agent("ada", model="x").export(file)
        with pytest.raises(InvalidRequestError):
            engine.import_agent(file, "zoe")
        assert engine.import_agent(file, "zoe", model="x").cached_tokens > 0
    alone = replace(settings, use_disk=True, adapter=NamedAdapter("x", given["x"]))
    with semantic.Engine(alone) as engine:
        assert engine.model.id == "semantic-tiny+x"
        again = engine.chat("ada", "And?", **options)
        assert again.cached_tokens >= first[1].prompt_tokens


@pytest.mark.process
def test_adapters_of_a_program_are_checked_before_anything_is_loaded(
    base: Path, adapters: dict[str, Path]
) -> None:
    with pytest.raises(InvalidRequestError, match="adapter a=b=x: expected NAME=PATH"):
        semantic.AsyncEngine(str(base), adapters={"a=b": "x"})
    settings = Settings(str(base), adapter=NamedAdapter("x", adapters["lora"]))
    with pytest.raises(InvalidRequestError, match="an adapter or adapters"):
        semantic.AsyncEngine(settings, adapters={"y": adapters["other"]})
    missing = base / "missing"
    with pytest.raises(ModelNotFoundError, match="no adapter folder"):
        semantic.Engine(str(base), adapters={"x": missing})


# --- what is refused --------------------------------------------------------------------------


def broken(adapter: Path, to: Path, change: Callable[[dict[str, object]], object]) -> Path:
    shutil.copytree(adapter, to)
    config = json.loads((to / CONFIG).read_text(encoding="utf-8"))
    change(config)
    (to / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return to


def lora(config: dict[str, object]) -> dict[str, object]:
    return cast("dict[str, object]", config["lora_parameters"])


CONFIGS: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "rank": (lambda one: lora(one).update(rank=8), r"28 of 28 arrays differ; .*: expected the"),
    "huge rank": (lambda one: lora(one).update(rank=2**40), "does not fit the model"),
    "no rank": (
        lambda one: lora(one).pop("rank"),
        "expected lora_parameters.rank to be at least 1",
    ),
    "text": (
        lambda one: lora(one).update(scale="20"),
        "expected lora_parameters.scale to be finite, got '20'",
    ),
    "NaN": (
        lambda one: lora(one).update(scale=float("nan")),
        "expected lora_parameters.scale to be finite",
    ),
    "too large": (
        lambda one: lora(one).update(scale=10**400),
        "expected lora_parameters.scale to be finite",
    ),
    "dropout": (
        lambda one: lora(one).update(dropout=2),
        "expected lora_parameters.dropout to be below 1",
    ),
    "keys": (
        lambda one: lora(one).update(keys=[1]),
        "expected lora_parameters.keys to be names of layers",
    ),
    "fewer keys": (lambda one: lora(one).update(keys=["mlp.up_proj"]), "24 of 28 .* got the shape"),
    "no layers": (lambda one: one.pop("num_layers"), "expected num_layers"),
    "parameters": (lambda one: one.update(lora_parameters=3), "expected lora_parameters"),
    "kind": (lambda one: one.update(fine_tune_type="ia3"), "to be lora, dora or full, got"),
    "DoRA": (lambda one: one.update(fine_tune_type="dora"), "14 of 42 .*m: expected the shape .*"),
    "full": (lambda one: one.update(fine_tune_type="full"), "28 of 28 .*expected none, got the"),
}


@pytest.mark.parametrize("which", CONFIGS)
def test_a_configuration_that_is_wrong_gives_one_message(
    base: Path, adapters: dict[str, Path], tmp_path: Path, which: str
) -> None:
    change, message = CONFIGS[which]
    folder = broken(adapters["lora"], tmp_path / "adapter", change)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        describe_model(base, adapter=folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(folder))


def truncated(folder: Path) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-8])


def renamed(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def pickled(folder: Path) -> None:
    np.save(folder / "x.npy", np.array([{"a": 1}], dtype=object))
    (folder / "x.npy").rename(folder / WEIGHTS)


def whole_model(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "config.json")


def integers(folder: Path) -> None:
    mx.save_safetensors(str(folder / WEIGHTS), {"a": mx.zeros((2,), dtype=mx.int32)})


def partial(folder: Path) -> None:
    weights = cast("dict[str, mx.array]", mx.load(str(folder / WEIGHTS)))
    del weights[max(weights)]
    mx.save_safetensors(str(folder / WEIGHTS), weights)


def nested(folder: Path) -> None:
    (folder / CONFIG).write_text("[" * 100_000, encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncated, "cannot read .*adapters.safetensors"),
        (renamed, "an adapter of PEFT, pickled: expected an adapter of mlx-lm"),
        (without_weights, r"has no adapters\.safetensors: expected an adapter of mlx-lm"),
        (pickled, "cannot read .*adapters.safetensors"),
        (whole_model, "is a whole model: serve it with --model"),
        (integers, "a is I32, expected floats"),
        (partial, "1 of 28 arrays differ; .* got none"),
        (nested, "cannot read .*adapter_config.json"),
        (shutil.rmtree, "no adapter folder"),
    ],
)
def test_files_that_are_broken_or_something_else_give_one_message(
    base: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    change: Callable[[Path], None],
    message: str,
) -> None:
    folder = shutil.copytree(adapters["lora"], tmp_path / "adapter")
    change(folder)
    with pytest.raises(ModelNotFoundError, match=message):
        describe_model(base, adapter=folder)


@pytest.mark.process
def test_an_adapter_of_another_model_is_refused_before_anything_is_loaded(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", "glm47")
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 64}), encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match="is not one of this model: 22 of 28"):
        describe_model(other, adapter=adapters["lora"])
    wrong = served(other, tmp_path / "store", ("lora", adapters["lora"]))
    settings = ModelsSettings([served(base, tmp_path / "store"), wrong], max_bytes=TIER + 3 * POOL)
    before = mx.get_active_memory()
    with pytest.raises(ModelNotFoundError, match="is not one of this model"):
        asyncio.run(load_models(settings))
    weights = (base / "model.safetensors").stat().st_size
    assert mx.get_active_memory() - before < weights / 2, "no model was loaded"


@pytest.mark.process
def test_an_adapter_that_changed_since_the_start_fails_its_load_and_no_other_model(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(adapters["lora"], tmp_path / "adapter")

    async def work() -> None:
        some = [served(base, tmp_path / "store"), served(base, tmp_path / "store", ("x", folder))]
        models = await load_models(ModelsSettings(some, max_bytes=TIER + 3 * POOL))
        partial(folder)
        with pytest.raises(Exception, match="1 of 28 arrays differ"):
            await models.load("base+x")
        await ask(models.serving_of(), prompt_of(20))
        (status,) = [one for one in models.statuses() if one.served.id == "base+x"]
        assert status.state == "unloaded"
        await models.close()

    asyncio.run(work())


# --- names ------------------------------------------------------------------------------------


def test_an_adapter_is_spelled_as_its_name_and_its_folder(tmp_path: Path) -> None:
    assert parse_adapter("sql=some/dir") == (None, NamedAdapter("sql", Path("some/dir")))
    assert parse_adapter("org/b+sql=a=b") == ("org/b", NamedAdapter("sql", Path("a=b")))
    assert parse_adapter(f"{tmp_path}/sql") == (None, NamedAdapter("sql", tmp_path / "sql"))
    for wrong in ("", "=x", "sql=", "a b=x", "base+=x", "../x=y", "x" * 101 + "=y"):
        with pytest.raises(InvalidRequestError, match="expected NAME=PATH"):
            parse_adapter(wrong)


def of_server(**given: object) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """The names of all models of a server with these settings, and the ids that others mean."""

    async def work() -> tuple[list[tuple[str, ...]], dict[str, str]]:
        flags = {"no_store": True, "pool_gb": 0.01, "ram_gb": 0.07, "models_gb": 0.2, **given}
        serving = await load_server(load_settings(flags).settings)
        assert serving.models is not None
        try:
            names = [one.served.names for one in serving.models.statuses()]
            accepted = {"x", "y", "default+x"}
            served = [one.served for one in serving.models.statuses()]
            meant = {name: one.id for name in accepted for one in served if one.accepts(name)}
            return names, meant
        finally:
            await serving.close()

    return asyncio.run(work())


def test_a_server_has_the_adapters_behind_their_base(
    base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    x = f"x={adapters['lora']}"
    names, meant = of_server(model=(str(base),), adapters=(x, f"y={adapters['other']}"))
    assert names == [("base", "default"), ("base+x",), ("base+y",)]
    assert meant == {"x": "base+x", "y": "base+y"}
    second = shutil.copytree(base, tmp_path / "second")
    of_two = (f"second+{x}", f"base+{x}", f"second+y={adapters['lora']}")
    names, meant = of_server(model=(str(base),), allowed_models=(str(second),), adapters=of_two)
    assert names == [("base", "default"), ("base+x",), ("second",), ("second+x",), ("second+y",)]
    assert meant == {"y": "second+y"}, "of two x neither is meant"
    two = (str(base), str(second))
    with pytest.raises(InvalidRequestError, match="must be one of base, second"):
        of_server(model=two, adapters=(x,))
    with pytest.raises(InvalidRequestError, match="must be one of base, second, got third"):
        of_server(model=two, adapters=(f"third+{x}",))
    with pytest.raises(InvalidRequestError, match=r"two models have the name base\+x"):
        of_server(model=(str(base),), adapters=(x, f"base+{x}"))


def test_the_model_that_agents_are_saved_with_has_the_tokenizer_of_its_base(base: Path) -> None:
    label = Settings(str(base), adapter=NamedAdapter("x", Path("a"))).label
    assert label == f"{base}+x"
    assert load_tokenizer(label).encode("text") == load_tokenizer(str(base)).encode("text")


def test_a_loaded_adapter_is_computed_as_mlx_lm_wrote_it(
    base: Path, adapters: dict[str, Path]
) -> None:
    """Joined products would hold the weights of the base a second time."""
    backend, _ = MLXModelProvider().load_model(str(base), adapters["lora"])
    assert isinstance(backend, MLXBackend)
    assert vars(backend.model)["_semantic_decoding_form"] is backend.model
