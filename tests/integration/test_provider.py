"""Finding and loading models: folders, hub ids, and everything that is not a model."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from semantic import BlockPool, BlockPoolBatchEngine, load
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.model import provider
from semantic.adapters.mlx.model.fingerprint import file_states, fingerprint
from semantic.adapters.mlx.model.provider import EMBEDDED_MODEL, find_folder
from semantic.domain.errors import ModelNotFoundError, WeightsTooLargeError
from semantic.ports.generation import at_once
from tests.support.own_process import in_own_process
from tests.support.reference import generate

_THIRD_PARTY = Path(__file__).parents[3] / "shared" / "models" / "stories260K"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model, to be broken."""
    return Path(shutil.copytree(find_folder(EMBEDDED_MODEL), tmp_path / "model"))


def test_the_embedded_model_is_found_loads_in_fp32_on_a_cpu_and_answers() -> None:
    model, tokenizer = load()
    if mx.default_device() == mx.Device(mx.cpu):
        assert {layer.itemsize for layer in model.cache_spec().layers} == {4}
    assert all(model.ragged_layers)
    assert model.vocab_size > 1000
    assert tokenizer.eos_token_ids


def test_a_folder_is_a_model_wherever_it_lies(folder: Path) -> None:
    here, _ = load(str(folder))
    there, _ = load()
    assert here.model_id == there.model_id


def test_other_weights_under_the_same_name_are_another_model(folder: Path) -> None:
    before = fingerprint(folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    assert fingerprint(folder) != before


def divide(folder: Path, *names: str) -> None:
    """Write the weights to these files, and an index of them."""
    alone = folder / "model.safetensors"
    weights = cast("dict[str, mx.array]", mx.load(str(alone)))
    alone.unlink()
    parts = {name: sorted(weights)[at :: len(names)] for at, name in enumerate(names)}
    for name, some in parts.items():
        mx.save_safetensors(str(folder / name), {one: weights[one] for one in some})
    found = {"weight_map": {one: name for name, some in parts.items() for one in some}}
    (folder / INDEX).write_text(json.dumps(found), encoding="utf-8")


def weights_of(backend: MLXBackend) -> dict[str, mx.array]:
    tree = cast("Callable[[], object]", backend.model.parameters)()
    return dict(cast("list[tuple[str, mx.array]]", tree_flatten(tree)))


INDEX = "model.safetensors.index.json"
TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("names", [TWO, ("one.safetensors", "two.safetensors"), ()])
def test_weights_beside_those_that_the_index_names_are_ignored(
    names: tuple[str, ...], folder: Path
) -> None:
    if names:
        divide(folder, *names)
    before, states = fingerprint(folder), file_states(folder)
    planted = folder / "model-00003-of-00002.safetensors"
    wrong = {"lm_head.weight": mx.zeros((3, 3)), "model.norm.weight": mx.zeros((3,))}
    mx.save_safetensors(str(planted), wrong)
    (folder / "consolidated.safetensors").write_bytes(b"of another format")
    assert (fingerprint(folder), file_states(folder)) == (before, states)
    model, _ = load(str(folder))
    assert model.model_id == before
    whole, _ = load()
    mine, theirs = weights_of(model), weights_of(whole)
    assert mine.keys() == theirs.keys()
    assert all(mx.array_equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b'{"weight_map": {"a": "../model.safetensors"}}', "which is not in its folder"),
        (b'{"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}', "is missing"),
        (b'{"weight_map": {"a": 1}}', "is not an index of weights"),
        (b'{"weight_map": ["a"]}', "is not an index of weights"),
        (b"{", "is not an index of weights"),
    ],
)
def test_an_index_is_read_as_data(index: bytes, words: str, folder: Path) -> None:
    (folder / INDEX).write_bytes(index)
    with pytest.raises(ModelNotFoundError, match=words):
        load(str(folder))


def test_an_index_of_files_of_which_none_is_there_counts_for_nothing(folder: Path) -> None:
    (folder / INDEX).write_bytes(b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert load(str(folder))


def test_a_folder_without_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"not a model folder: it has no config\.json"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    "missing", ["model.safetensors", "tokenizer.json"], ids=["weights", "tokenizer"]
)
def test_a_folder_with_a_part_missing_is_refused(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelNotFoundError, match="cannot load the model in"):
        load(str(folder))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "no_such_architecture"}'),
        ("config.json", b"{}"),
        ("model.safetensors", b"\x00" * 100),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"model": {"type": "NoSuchModel"}}'),
        ("tokenizer_config.json", b'{"tool_parser_type": "no_such_parser"}'),
        ("tokenizer_config.json", b'{"chat_template_type": "no_such_template"}'),
    ],
)
def test_a_broken_folder_is_refused_with_one_message(
    folder: Path, file: str, content: bytes
) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ModelNotFoundError, match="cannot load the model in"):
        load(str(folder))


def another_model(folder: Path) -> None:
    """The same architecture with other weights, moved over the first."""
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    other = {name: weight * 1.01 for name, weight in weights.items()}
    mx.save_safetensors(str(folder / "new.safetensors"), other, {"format": "mlx"})
    (folder / "new.safetensors").replace(folder / "model.safetensors")


@pytest.mark.parametrize("when", ["before it is read", "after it was read"])
def test_weights_exchanged_while_they_are_loaded_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Their keys and values would be stored under the name of the others."""
    moments = []

    def exchange(path: Path, *, lazy: bool) -> object:
        if when == "before it is read":
            another_model(folder)
        loaded = load_model(path, lazy=lazy)
        if when == "after it was read":
            another_model(folder)
        moments.append(path)
        return loaded

    monkeypatch.setattr(provider, "load_weights", exchange)
    with pytest.raises(ModelNotFoundError, match=r"safetensors changed while it was loading"):
        load(str(folder))
    assert moments
    monkeypatch.undo()
    assert load(str(folder))[0].model_id == fingerprint(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] //= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match="cannot load the model in"):
        load(str(folder))


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/no/where", "a/b/c", ""])
def test_what_is_neither_folder_nor_hub_id_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        load(name)


def test_a_hub_id_offline_says_that_it_is_not_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="neither a folder nor in the hub's cache"):
        load("some-org/some-model")


def test_a_hub_id_in_the_cache_needs_no_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    repo = tmp_path / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(find_folder(EMBEDDED_MODEL), repo / "snapshots" / commit)
    assert find_folder("org/tiny") == repo / "snapshots" / commit


@pytest.mark.skipif(not _THIRD_PARTY.is_dir(), reason=f"no {_THIRD_PARTY.name} beside the project")
def test_real_trained_weights_of_others_answer_as_under_mlx_lm() -> None:
    model, tokenizer = load(str(_THIRD_PARTY))
    spec = model.cache_spec()
    pool: BlockPool = BlockPool(spec, total_blocks=100)
    engine = BlockPoolBatchEngine(model, tokenizer, pool, spec)
    starts = ["Once upon a time", "Tom and his dog", "Lily was sad because", "The"]
    uids = [engine.submit(f"a{i}", text, max_tokens=150) for i, text in enumerate(starts)]
    done = {end.uid: end for end in engine.step()}
    for uid, start in zip(uids, starts, strict=True):
        prompt = tokenizer.encode(start)
        expected = generate(model.model, prompt, 150, tokenizer.eos_token_ids)
        assert list(done[uid].tokens) == expected
    first = done[uids[0]]
    assert "Lily" in first.text
    # The next turn reuses the whole story.
    more = tokenizer.encode(" She said", add_special_tokens=False)
    uid = engine.submit("a0", more, cache=first.blocks, max_tokens=30, append=True)
    again = {end.uid: end for end in engine.step()}[uid]
    assert first.blocks is not None
    whole = [*tokenizer.encode(starts[0]), *first.tokens, *more]
    assert list(again.tokens) == generate(model.model, whole, 30, tokenizer.eos_token_ids)
    assert again.cached_tokens == len(whole) - len(more)


@pytest.mark.process
def test_weights_are_read_in_pieces_between_which_others_compute(folder: Path) -> None:
    in_own_process("tests.integration.test_provider:read_in_pieces", folder)


def read_in_pieces(folder: str) -> None:
    """No step takes memory for much more than a piece of the weights."""
    piece = 1 << 20
    provider._SLICE_BYTES = piece
    work, read, before = provider.reading_model(Path(folder)), [0], mx.get_active_memory()
    for awaited in work:
        if awaited is not None:
            awaited.exception()
        read.append(mx.get_active_memory() - before)
    model, _ = load_model(Path(folder))
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    sizes = [weight.nbytes for _, weight in weights]
    steps = [later - earlier for earlier, later in itertools.pairwise(read)]
    assert read[-1] >= sum(sizes)
    assert max(steps) < 2 * (piece + max(sizes)), "at most twice as wide in memory as in the file"


def test_weights_for_which_there_is_too_little_room_are_not_read(folder: Path) -> None:
    before = mx.get_active_memory()
    with pytest.raises(WeightsTooLargeError, match=r"take \d+ bytes: .* at most 1000") as caught:
        at_once(provider.reading_model(folder, max_bytes=1000))
    assert mx.get_active_memory() - before < caught.value.n_bytes // 4
    at_once(provider.reading_model(folder, max_bytes=caught.value.n_bytes))
