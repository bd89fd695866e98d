"""Vectors on OpenAI's and Ollama's wires over a fake model."""

from __future__ import annotations

import base64
from array import array
from typing import cast

import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.embedding_create_params import EmbeddingCreateParams
from pydantic import SecretStr
from starlette.testclient import TestClient

from semantic.application.embeddings import Embeddings
from semantic.application.fair_threads import FairThreads
from semantic_server.http.app import create_app
from semantic_server.http.ollama.options import EMBED_FIELDS
from semantic_server.http.openai.fields import EMBEDDING_FIELDS
from semantic_server.http.settings import ServerSettings
from tests.clients import ollama_fields
from tests.support.fake_embedder import MODEL, FakeEmbedder, at_once, counted
from tests.support.fake_serving import FakeServing
from tests.support.served_agents import AtOnce

Json = dict[str, object]

V1, EMBED, OLDER = "/v1/embeddings", "/api/embed", "/api/embeddings"
RERANK = "/v1/rerank"


class Wire:
    """The one application with an embedding model, and requests to it."""

    app = create_app(FakeServing())
    workers = FairThreads(2, "test")

    def __init__(self) -> None:
        self.fake = FakeEmbedder()
        self.app.state.context.embedding = Embeddings(
            MODEL, self.fake, at_once, self.workers, AtOnce()
        )
        self.client = TestClient(self.app, "http://127.0.0.1:8000", raise_server_exceptions=False)

    def post(self, path: str, **fields: object) -> Json:
        response = self.client.post(path, json={"model": "vectors", **fields})
        assert response.status_code == 200, response.text
        return cast(Json, response.json())

    def error(self, path: str, status: int = 400, /, **fields: object) -> str:
        response = self.client.post(path, json={"model": "vectors", **fields})
        assert response.status_code == status, response.text
        error = response.json()["error"]
        return str(error if path.startswith("/api") else error["message"])


def test_vectors_as_openais_client_reads_them() -> None:
    reply = CreateEmbeddingResponse.model_validate(Wire().post(V1, input=["ab", "dd"]))
    assert [one.index for one in reply.data] == [0, 1]
    assert [array("f", one.embedding) for one in reply.data] == [counted("ab"), counted("dd")]
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == ("vectors", 6, 6)


def test_vectors_in_base_64() -> None:
    reply = Wire().post(V1, input="ab", encoding_format="base64", dimensions=2)
    [one] = cast(list[Json], reply["data"])
    vector = array("f", base64.b64decode(str(one["embedding"])))
    assert vector.tolist() == pytest.approx([0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize("model", ["vectors", "default", "/models/vectors"])
def test_names_of_the_model(model: str) -> None:
    Wire().post(V1, model=model, input="a")
    Wire().post(EMBED, model=f"{model}:latest", input="a")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"input": [1, 2, 3]}, "input[0]: token ids of another model"),
        ({"input": [[1, 2], [3]]}, "input[0]: token ids of another model"),
        ({"input": ["a", 7.5]}, "input[1]: expected a string"),
        ({"input": ""}, "input[0] must not be empty"),
        ({}, "input: expected a list"),
        ({"input": ["a"] * 2049}, "input: expected at most 2048 strings"),
        ({"input": "a" * 20}, "maximum context length is 20 tokens"),
        ({"input": "a", "dimensions": 5}, "dimensions: expected 1 to 4"),
        ({"input": "a", "dimensions": 0}, "dimensions must be at least 1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: expected one of float"),
        ({"input": "a", "dimesions": 5}, "did you mean dimensions?"),
        ({"input": "a", "model": 5}, "model: expected a string"),
        ({"input": "a", "semantic": {"back_in": "5"}}, "semantic.back_in: expected a valid number"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: Json, problem: str) -> None:
    wire = Wire()
    assert problem in wire.error(V1, **fields)
    assert wire.fake.batches == []


def test_another_model_is_not_found() -> None:
    assert "expected one of vectors" in Wire().error(V1, 404, input="a", model="fake")
    assert "expected one of vectors" in Wire().error(EMBED, 404, input="a", model="fake")
    fields: Json = {"query": "a", "documents": ["a"], "model": "fake"}
    assert Wire().error(RERANK, 404, **fields) == Wire().error(V1, 404, input="a", model="fake")


def test_a_server_without_an_embedding_model_says_how_to_get_one() -> None:
    wire = Wire()
    wire.app.state.context.embedding = None
    for path in (V1, EMBED, OLDER, RERANK):
        assert "--embedding-model" in wire.error(path, 404, input="a")


def test_vectors_as_ollama_sends_them() -> None:
    reply = Wire().post(EMBED, input=["ab", "c"], keep_alive="5m", options={"num_ctx": 5})
    assert reply["embeddings"] == [counted("ab").tolist(), counted("c").tolist()]
    assert (reply["model"], reply["prompt_eval_count"]) == ("vectors", 5)
    assert cast(int, reply["total_duration"]) > 0
    assert Wire().post(OLDER, prompt="ab")["embedding"] == counted("ab").tolist()
    for path, name in ((EMBED, "embeddings"), (OLDER, "embedding")):
        assert Wire().post(path)[name] == []


def test_ollama_cuts_what_is_too_long_unless_it_must_not() -> None:
    wire = Wire()
    assert wire.post(EMBED, input="b" * 99)["prompt_eval_count"] == 20
    assert "expected at most 20 tokens" in wire.error(EMBED, input="b" * 99, truncate=False)
    assert "keep_alive" in wire.error(EMBED, input="b", keep_alive="soon")


def test_what_is_not_kept_is_computed_again() -> None:
    wire = Wire()
    for _ in range(2):
        wire.post(V1, input="ab", semantic={"keep": False})
        wire.post(EMBED, input="ab", semantic={"keep": False})
        wire.post(RERANK, query="ab", documents=["ab"], semantic={"keep": False})
    assert len(wire.fake.batches) == 6


def test_every_documented_field_is_in_a_table() -> None:
    assert set(EMBEDDING_FIELDS) - {"semantic"} == set(EmbeddingCreateParams.__annotations__)
    assert set(EMBED_FIELDS) - {"semantic"} == ollama_fields.EMBED


def test_the_model_is_listed_after_the_one_that_answers() -> None:
    client = Wire().client
    assert [one["id"] for one in client.get("/v1/models").json()["data"]][-1] == "vectors"
    assert client.get("/v1/models?limit=1").json()["has_more"]
    assert client.get("/v1/models/vectors").json()["max_model_len"] == 20
    assert client.get("/v1/models/default").json()["max_model_len"] == 512
    assert client.get("/api/tags").json()["models"][-1]["name"] == "vectors:latest"
    assert len(client.get("/api/ps").json()["models"]) == 2
    shown = client.post("/api/show", json={"model": "vectors:latest"}).json()
    assert shown["capabilities"] == ["embedding"]
    default = client.post("/api/show", json={"model": "default"}).json()
    assert default["capabilities"] == ["completion", "tools"]
    assert client.get("/api/v0/models/vectors").json()["type"] == "embeddings"


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank"])
def test_documents_come_by_their_similarity_and_equal_ones_by_their_place(path: str) -> None:
    titled = {"text": "ab", "title": "Two letters"}
    documents = ["d", "ab", "a", titled, {"text": "aab"}]
    reply = Wire().post(path, query="a", documents=documents)
    results = cast(list[Json], reply["results"])
    assert [one["index"] for one in results] == [2, 4, 1, 3, 0]
    scores = [one["relevance_score"] for one in results]
    assert scores == pytest.approx([1, 0.8**0.5, 0.5**0.5, 0.5**0.5, 0])
    shown = [{"text": "a"}, {"text": "aab"}, {"text": "ab"}, titled, {"text": "d"}]
    assert [one["document"] for one in results] == shown
    assert (reply["model"], reply["usage"]) == ("vectors", {"total_tokens": 16})


def test_a_client_chooses_how_many_documents_come_and_whether_with_their_texts() -> None:
    fields: Json = {"query": "a", "documents": ["b", "a"], "return_documents": False}
    results = cast(list[Json], Wire().post(RERANK, top_n=1, **fields)["results"])
    assert [list(one) for one in results] == [["index", "relevance_score"]]
    assert [one["index"] for one in results] == [1]
    assert len(cast(list[Json], Wire().post(RERANK, top_n=9, **fields)["results"])) == 2


def test_a_ranked_document_is_not_computed_again() -> None:
    wire = Wire()
    wire.post(RERANK, query="a", documents=["b", "ab", "b"])
    wire.post(RERANK, query="c", documents=[{"text": "ab"}, "b", "abc", "a"])
    wire.post(V1, input=["abc", "b", "c"])
    assert wire.fake.batches == [["a", "b", "ab"], ["c", "abc"]]


def test_tenants_share_no_vector_of_a_document() -> None:
    wire = Wire()
    app = create_app(
        FakeServing(), ServerSettings(api_keys=(SecretStr("a" * 20), SecretStr("b" * 20)))
    )
    app.state.context.embedding = wire.app.state.context.embedding
    client = TestClient(app, "http://127.0.0.1:8000")
    body = {"model": "vectors", "query": "a", "documents": ["b"]}
    for letter in "aab":
        headers = {"authorization": f"Bearer {letter * 20}"}
        assert client.post(RERANK, json=body, headers=headers).status_code == 200
    assert client.post(RERANK, json=body).status_code == 401
    assert wire.fake.batches == [["a", "b"], ["a", "b"]]


_RANGE = "documents must be a list of 1 to 2048 texts, got"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"documents": []}, f"{_RANGE} 0"),
        ({"documents": ["a"] * 2049}, f"{_RANGE} 2049"),
        ({"documents": "a"}, f"{_RANGE} a string"),
        ({"documents": None}, f"{_RANGE} null"),
        ({"documents": ["a", 5]}, "documents[1] must be a text that is not empty, got a number"),
        ({"documents": ["a", ""]}, "documents[1] must be a text that is not empty, got an empty"),
        ({"documents": [{"title": "a"}]}, "documents[0].text must be a text that is not empty"),
        ({"documents": [["a"]]}, "documents[0] must be a text that is not empty, got a list"),
        ({"query": {"text": "a"}}, "query must be a text that is not empty, got an object"),
        ({"query": None}, "query must be a text that is not empty, got null"),
        ({"documents": ["a" * 20]}, "maximum context length is 20 tokens"),
        ({"top_n": 0}, "top_n must be at least 1, got 0"),
        ({"top_n": "1"}, "top_n: expected a whole number"),
        ({"return_documents": "no"}, "return_documents: expected true or false"),
        ({"top_k": 5}, "top_k: use top_n"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc: this server never cuts documents"),
        ({"rank_fields": ["title"]}, "rank_fields: only the text of a document counts"),
        ({"document": ["a"]}, "did you mean documents?"),
        ({"model": 5}, "model: expected a string"),
    ],
)
def test_a_ranking_that_cannot_be_honoured_is_refused_by_name(fields: Json, problem: str) -> None:
    wire = Wire()
    assert problem in wire.error(RERANK, **{"query": "a", "documents": ["a"], **fields})
    assert wire.fake.batches == []
