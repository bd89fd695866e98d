"""/v1/models: the names that requests may use, with the fields of both clients' families."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel

from semantic.adapters.http.context import serving_of
from semantic.domain.errors import ModelNotFoundError
from semantic.ports.serving import ServedModel

router: Final = APIRouter(tags=["models"])

_OWNER: Final = "semantic"


class Model(BaseModel):
    """A name that requests may use. `max_model_len`, `context_length` and `max_input_tokens` are
    the same number of tokens, under the names that clients look for."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = _OWNER
    lifecycle: Literal["active"] = "active"
    max_model_len: int
    context_length: int
    max_input_tokens: int


class Models(BaseModel):
    """All names, or the first of them."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.get("/v1/models")
async def list_models(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 1000
) -> Models:
    """The names that requests may use, the model's own id first."""
    served = serving_of(request).model
    listed = [_model(name, served) for name in served.names[:limit]]
    return Models(
        data=listed,
        has_more=limit < len(served.names),
        first_id=listed[0].id,
        last_id=listed[-1].id,
    )


@router.get("/v1/models/{model_id:path}")
async def show_model(request: Request, model_id: str) -> Model:
    """One of the names."""
    served = serving_of(request).model
    if model_id not in served.names:
        names = ", ".join(served.names)
        raise ModelNotFoundError(f"there is no model of that name here; expected one of {names}")
    return _model(model_id, served)


def _model(name: str, served: ServedModel) -> Model:
    return Model(
        id=name,
        display_name=name,
        created=served.created,
        created_at=datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_model_len=served.context_tokens,
        context_length=served.context_tokens,
        max_input_tokens=served.context_tokens,
    )
