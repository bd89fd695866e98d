"""POST /api/embed, and /api/embeddings of older clients."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from semantic.ports.embedding import Embedded, EmbeddingModel
from semantic_server.http.context import embedding_of
from semantic_server.http.ollama.models import of_a_model
from semantic_server.http.ollama.options import EMBED_FIELDS, EMBEDDINGS_FIELDS, read_keep_alive
from semantic_server.http.ollama.request import LATEST
from semantic_server.http.openai.embeddings import (
    as_numbers,
    check_embedding_model,
    embedded,
    texts_at,
)
from semantic_server.http.openai.fields import Json, warnings
from semantic_server.http.request_body import on_thread, read_json
from semantic_server.http.request_fields.table import (
    Field,
    at_least_one,
    fields_of,
    flag_at,
    object_at,
    text_at,
    tokens_at,
)

router: Final = APIRouter(tags=["Ollama"])

_REPLY: Final = "The vectors."


@dataclass(frozen=True, slots=True)
class _Request:
    """`keep_alive` is how many seconds the model stays loaded afterwards."""

    model: str
    texts: tuple[str, ...]
    dimensions: int | None
    truncate: bool
    keep_alive: float | None


@router.post("/api/embed", openapi_extra=of_a_model(_REPLY))
async def embed(request: Request) -> Response:
    """Return the vectors of texts, as Ollama does. Cuts long texts unless `truncate` is false."""
    began = time.perf_counter_ns()
    body = await read_json(request)
    parsed = await on_thread(request, _read, body, embedding_of(request).model, EMBED_FIELDS)
    found = await embedded(request, body, parsed.texts, parsed.dimensions, truncate=parsed.truncate)
    head: Json = {
        "model": parsed.model,
        "total_duration": time.perf_counter_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": found.tokens,
    }
    reply = await on_thread(request, _reply, head, found)
    return Response(reply, media_type="application/json")


@router.post("/api/embeddings", openapi_extra=of_a_model(_REPLY))
async def embeddings(request: Request) -> Response:
    """Return the vector of one text, for older clients of Ollama."""
    body = await read_json(request)
    parsed = await on_thread(request, _read, body, embedding_of(request).model, EMBEDDINGS_FIELDS)
    found = await embedded(request, body, parsed.texts, parsed.dimensions, truncate=parsed.truncate)
    vectors = [vector.tolist() for vector in found.vectors]
    return JSONResponse({"embedding": vectors[0] if vectors else []})


def _read(
    body: Mapping[str, object], model: EmbeddingModel, table: Mapping[str, Field]
) -> _Request:
    known = fields_of(body, table, {}, warnings)
    check_embedding_model(known.get("model"), model, LATEST)
    object_at("options", known.get("options", {}))
    if table is EMBED_FIELDS:
        texts = texts_at("input", known.get("input", []))
    else:
        texts = (text_at("prompt", known.get("prompt", "")),)
    dimensions = tokens_at("dimensions", known.get("dimensions"))
    return _Request(
        text_at("model", known["model"]),
        () if texts == ("",) else texts,  # only loads the model
        at_least_one("dimensions", dimensions),
        flag_at("truncate", known.get("truncate", True)),
        read_keep_alive(known.get("keep_alive")),
    )


def _reply(head: Json, found: Embedded) -> bytes:
    vectors = ", ".join(map(as_numbers, found.vectors))
    return f'{json.dumps(head)[:-1]}, "embeddings": [{vectors}]}}'.encode()
