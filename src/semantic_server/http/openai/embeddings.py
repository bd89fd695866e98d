"""POST /v1/embeddings and /v1/rerank: vectors of texts, and documents by similarity to a query.
Refuses token ids: they belong to another tokenizer."""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from semantic.application.embeddings import best_first
from semantic.domain.errors import ModelNotFoundError
from semantic.ports.embedding import Embedded, EmbeddingModel, Vector
from semantic_server.http.context import embedding_of, until_disconnect
from semantic_server.http.errors import FieldError
from semantic_server.http.identity import tenant_of
from semantic_server.http.openai.fields import EMBEDDING_FIELDS, RERANK_FIELDS, Json, known_fields
from semantic_server.http.openai.replies import openai_body
from semantic_server.http.request_body import described, kind_of, on_thread, read_json
from semantic_server.http.request_fields.table import (
    at_least_one,
    flag_at,
    list_at,
    own_field_of,
    text_at,
    tokens_at,
)

router: Final = APIRouter(tags=["openai"])

MAX_INPUTS: Final = 2048
"""OpenAI's documented limit on texts in one request."""

_TOKENS: Final = (
    "token ids of another model: send texts (in LangChain check_embedding_ctx_length=False)"
)


@dataclass(frozen=True, slots=True)
class _Request:
    texts: tuple[str, ...]
    dimensions: int | None
    as_text: Callable[[Vector], str]


@router.post("/api/v0/embeddings", include_in_schema=False)
@router.post("/v1/embeddings", openapi_extra=openai_body("input", streams=False))
async def create_embeddings(request: Request) -> Response:
    """Return the vectors of texts, as OpenAI's embeddings do."""
    body = await read_json(request)
    model = embedding_of(request).model
    parsed = await on_thread(request, _read, body, model)
    found = await embedded(request, body, parsed.texts, parsed.dimensions)
    reply = await on_thread(request, _reply, found, model.id, parsed.as_text)
    return Response(reply, media_type="application/json")


async def embedded(
    request: Request,
    body: Mapping[str, object],
    texts: Sequence[str],
    dimensions: int | None = None,
    *,
    truncate: bool = False,
) -> Embedded:
    """Return the vectors of `texts`, as `EmbeddingPort.embed` does. Ends with the connection."""
    keep = own_field_of(request, body).keep
    work = embedding_of(request).embed(
        texts, tenant_of(request), dimensions=dimensions, truncate=truncate, keep=keep
    )
    return await until_disconnect(request, work)


def _read(body: Mapping[str, object], model: EmbeddingModel) -> _Request:
    known = known_fields(body, EMBEDDING_FIELDS)
    check_embedding_model(known.get("model"), model)
    encoding = known.get("encoding_format", "float")
    if not isinstance(encoding, str) or encoding not in _ENCODINGS:
        path = "encoding_format"
        raise FieldError(f"{path}: expected one of {', '.join(_ENCODINGS)}", param=path)
    dimensions = tokens_at("dimensions", known.get("dimensions"))
    return _Request(
        texts_at("input", known.get("input")),
        at_least_one("dimensions", dimensions),
        _ENCODINGS[encoding],
    )


def check_embedding_model(name: object, model: EmbeddingModel, tag: str = "") -> None:
    """Raise ModelNotFoundError unless the embedding model is called `name`. The name may have the
    suffix `tag`. Raises FieldError unless `name` is a text."""
    given = text_at("model", name)
    if not (model.accepts(given) or model.accepts(given.removesuffix(tag))):
        known = ", ".join(model.names)
        raise ModelNotFoundError(
            f"no embedding model {given[:200]!r} here; expected one of {known}"
        )


def texts_at(path: str, value: object) -> tuple[str, ...]:
    """Read a text, or a list of at most `MAX_INPUTS` texts. Raises FieldError."""
    if isinstance(value, str):
        return (value,)
    given = list_at(path, value)
    if len(given) > MAX_INPUTS and not _are_ids(given):
        raise FieldError(f"{path}: expected at most {MAX_INPUTS} strings", param=path)
    return tuple(_text(f"{path}[{i}]", one) for i, one in enumerate(given))


def _text(path: str, value: object) -> str:
    if type(value) is int or (isinstance(value, list) and _are_ids(value)):
        raise FieldError(f"{path}: {_TOKENS}", param=path)
    return text_at(path, value)


def _are_ids(values: Sequence[object]) -> bool:
    return all(type(one) is int for one in values)


def _reply(found: Embedded, model: str, as_text: Callable[[Vector], str]) -> bytes:
    usage: Json = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    head = json.dumps({"object": "list", "model": model, "usage": usage})
    return f'{head[:-1]}, "data": [{", ".join(_data(found, as_text))}]}}'.encode()


def _data(found: Embedded, as_text: Callable[[Vector], str]) -> Iterator[str]:
    for index, vector in enumerate(found.vectors):
        member = f'"object": "embedding", "index": {index}, "embedding": {as_text(vector)}'
        yield f"{{{member}}}"


def as_numbers(vector: Vector) -> str:
    """Return one vector as a JSON list of numbers."""
    return json.dumps(vector.tolist())


def _in_base_64(vector: Vector) -> str:
    """Return `vector` as base64 of little-endian 32-bit floats, in JSON."""
    little = array("f", vector)
    if sys.byteorder == "big":
        little.byteswap()
    return json.dumps(base64.b64encode(little.tobytes()).decode("ascii"))


_ENCODINGS: Final[dict[str, Callable[[Vector], str]]] = {"float": as_numbers, "base64": _in_base_64}


# Reranking


@dataclass(frozen=True, slots=True)
class _Rerank:
    """`texts` are the query and those of the documents. Without `top_n` all are results."""

    texts: tuple[str, ...]
    documents: tuple[object, ...]
    top_n: int | None
    returns: bool


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post(
    "/v1/rerank",
    openapi_extra=described(
        {"model": {"type": "string"}, "query": {"type": "string"}, "documents": {"type": "array"}},
        {"top_n": {"type": "integer"}, "return_documents": {"type": "boolean"}},
        "The documents' indexes and scores.",
        body="As Jina and Cohere document it; an unsupported field is a 400.",
    ),
)
async def rerank(request: Request) -> Response:
    """Return documents by the cosine similarity of their vectors to the query's, best first."""
    body = await read_json(request)
    model = embedding_of(request).model
    parsed = await on_thread(request, _read_rerank, body, model)
    found = await embedded(request, body, parsed.texts)
    reply = await on_thread(request, _ranking, found, model.id, parsed)
    return Response(reply, media_type="application/json")


def _read_rerank(body: Mapping[str, object], model: EmbeddingModel) -> _Rerank:
    known = known_fields(body, RERANK_FIELDS)
    check_embedding_model(known.get("model"), model)
    path, given = "documents", known.get("documents")
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_INPUTS:
        got = len(given) if isinstance(given, list) else kind_of(given)
        raise FieldError(f"{path} must be a list of 1 to {MAX_INPUTS} texts, got {got}", param=path)
    texts = (_document(f"{path}[{i}]", one) for i, one in enumerate(given))
    return _Rerank(
        (_filled("query", known.get("query")), *texts),
        tuple(one if isinstance(one, dict) else {"text": one} for one in given),
        at_least_one("top_n", tokens_at("top_n", known.get("top_n"))),
        flag_at("return_documents", known.get("return_documents", True)),
    )


def _document(path: str, given: object) -> str:
    if isinstance(given, dict):
        return _filled(f"{path}.text", given.get("text"))
    return _filled(path, given)


def _filled(path: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        got = "an empty string" if given == "" else kind_of(given)
        raise FieldError(f"{path} must be a text that is not empty, got {got}", param=path)
    return given


def _ranking(found: Embedded, model: str, parsed: _Rerank) -> bytes:
    query, *documents = found.vectors
    results: list[Json] = []
    for index, score in best_first(query, documents)[: parsed.top_n]:
        shown: Json = {"document": parsed.documents[index]} if parsed.returns else {}
        results.append({"index": index, "relevance_score": score, **shown})
    usage = {"total_tokens": found.tokens}
    return json.dumps({"model": model, "results": results, "usage": usage}).encode()
