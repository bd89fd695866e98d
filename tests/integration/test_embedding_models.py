"""Vectors of a decoder that mlx-lm loads: those of its own states, however texts are batched."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load
from starlette.testclient import TestClient

from semantic.adapters.mlx.model import load_embedder as loading
from semantic.adapters.mlx.model.load_embedder import load_embedder, states_of
from semantic.application.embeddings import Embeddings
from semantic.domain.errors import ModelNotFoundError, UnsupportedModelError
from semantic.ports.embedding import Embedder, EmbeddingModel, Vector
from semantic_server.http.app import create_app
from tests.support.embedding_model import CONTEXT, END, WIDTH, write_embedding_model
from tests.support.fake_embedder import at_once
from tests.support.fake_serving import FakeServing
from tests.support.served_agents import AtOnce

TEXTS = ("Oslo", "The sea is calm today.", "A ship " * 40, "x")
NEAR = 1e-5
"""In fp32, for vectors of length 1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding_model(tmp_path_factory.mktemp("models") / "vectors")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return load_embedder(folder)[0]


def computed(embedder: Embedder, *texts: str) -> list[Vector]:
    run = embedder.start([embedder.encode(text) for text in texts])
    found = None
    while found is None:
        found = run.step()
    return list(found)


def reference(folder: Path, text: str, pooling: str) -> list[float]:
    """What mlx-lm's own model and numpy compute for one text alone."""
    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    states = np.array(model.model(mx.array([tokenizer.encode(text)])))[0]
    pooled = {"last": states[-1], "mean": states.mean(axis=0), "first": states[0]}[pooling]
    return list(pooled / np.linalg.norm(pooled))


@pytest.mark.parametrize(
    ("declared", "pooling"),
    [
        ("pooling_mode_lasttoken", "last"),
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "first"),
    ],
)
def test_vectors_are_those_of_the_models_own_states(
    tmp_path: Path, declared: str, pooling: str
) -> None:
    folder = write_embedding_model(tmp_path / "vectors", declared)
    embedder, _ = load_embedder(folder)
    found = computed(embedder, *TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        assert len(vector) == WIDTH
        assert vector.tolist() == pytest.approx(reference(folder, text, pooling), abs=NEAR)


def test_a_ranking_has_the_cosines_of_the_models_own_states(
    folder: Path, embedder: Embedder
) -> None:
    model = EmbeddingModel(("vectors",), embedder.dimensions, embedder.max_tokens, 0)
    app = create_app(FakeServing())
    served = Embeddings(model, embedder, at_once, AtOnce(), AtOnce())
    app.state.context.embedding = served
    texts = ("Which city?", *TEXTS, TEXTS[1])
    body = {"model": "vectors", "query": texts[0], "documents": texts[1:]}
    reply = TestClient(app, "http://127.0.0.1:8000").post("/v1/rerank", json=body).json()
    query, *vectors = [np.array(reference(folder, text, "last")) for text in texts]
    cosines = [float(query @ vector) for vector in vectors]
    found = {one["index"]: one["relevance_score"] for one in reply["results"]}
    assert [found[i] for i in range(len(cosines))] == pytest.approx(cosines, abs=NEAR)
    assert list(found) == sorted(found, key=lambda i: (-found[i], i))
    assert list(found).index(1) + 1 == list(found).index(len(TEXTS)), "equal ones by their place"
    assert reply["usage"]["total_tokens"] == sum(len(embedder.encode(text)) for text in texts)


def test_a_batch_and_its_chunks_change_no_vector(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = computed(embedder, *TEXTS)
    alone = [computed(embedder, text)[0] for text in TEXTS]
    monkeypatch.setattr(loading, "CHUNK_TOKENS", 8)
    in_chunks = computed(embedder, *TEXTS)
    for one, two, three in zip(together, alone, in_chunks, strict=True):
        assert one.tolist() == pytest.approx(two.tolist(), abs=NEAR)
        assert one.tolist() == pytest.approx(three.tolist(), abs=NEAR)


def test_every_text_ends_with_the_tokenizers_own_token(embedder: Embedder) -> None:
    assert embedder.encode("Oslo")[-1:] == embedder.encode("")
    long = embedder.encode("word " * 3000)
    assert len(long) > embedder.max_tokens == CONTEXT
    short = embedder.shortened(long)
    assert len(short) == CONTEXT
    assert short[-1:] == embedder.encode("")
    assert short[:-1] == long[: CONTEXT - 1]


def test_without_a_declaration_the_last_token_counts(tmp_path: Path, embedder: Embedder) -> None:
    plain, details = load_embedder(write_embedding_model(tmp_path / "plain", None))
    assert computed(plain, "Oslo") == computed(embedder, "Oslo")
    assert (details.architecture, details.stored_as) == ("qwen3", "f32")


def test_a_pooling_of_another_kind_is_another_model(tmp_path: Path, embedder: Embedder) -> None:
    folder = write_embedding_model(tmp_path / "mean", "pooling_mode_mean_tokens")
    assert load_embedder(folder)[0].model_id != embedder.model_id


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("1_Pooling/config.json", '{"pooling_mode_max_tokens": true}', "expected one of"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_lasttoken": true, "pooling_mode_mean_tokens": true}',
            "expected one of",
        ),
        ("1_Pooling/config.json", "{", "cannot read"),
        ("modules.json", json.dumps([{"type": "sentence_transformers.models.Dense"}]), "Dense"),
    ],
)
def test_vectors_that_would_be_others_are_refused(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    folder = write_embedding_model(tmp_path / "vectors")
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=problem):
        load_embedder(folder)


def test_a_declared_length_is_the_limit(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "vectors")
    declared = json.dumps({"max_seq_length": 16})
    (folder / "sentence_bert_config.json").write_text(declared, encoding="utf-8")
    assert load_embedder(folder)[0].max_tokens == 16


def test_a_model_that_mlx_lm_has_not_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_embedding_model(tmp_path / "vectors")
    (folder / "config.json").write_text('{"model_type": "of_another"}', encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match="of_another"):
        load_embedder(folder)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_an_encoder_says_what_to_install(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"install .*semantic-engine\[embeddings\]"):
        load_embedder(tmp_path)


def test_states_that_the_logits_are_not_made_of_are_refused(folder: Path) -> None:
    model = load(str(folder))[0]
    states_of(model)
    model.lm_head = lambda states: states @ mx.ones((WIDTH, 5))
    with pytest.raises((UnsupportedModelError, ValueError)):
        states_of(model)


def test_the_end_of_texts_is_what_the_test_thinks(embedder: Embedder) -> None:
    assert len(embedder.encode("")) == 1, END
