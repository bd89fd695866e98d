"""/v1/models, /api/v0/models, /tokenize, /detokenize: the served model's names and its tokenizer.

Models have the fields of both client families, or LM Studio's; tokenization follows vLLM's routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Final, Literal

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr, TypeAdapter

from semantic.adapters.http.context import serving_of
from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.identity import tenant_of
from semantic.adapters.http.openai.chat.request import conversation_of
from semantic.adapters.http.request_body import read_as, read_json, validated
from semantic.domain.errors import ModelNotFoundError
from semantic.ports.serving import ServedModel

router: Final = APIRouter()

_OWNER: Final = "semantic"


class Model(BaseModel):
    """A name that requests may use. `max_model_len`, `context_length` and `max_input_tokens` are
    the same number of tokens under the names that different clients read."""

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


@router.get("/v1/models", tags=["models"])
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


@router.get("/v1/models/{model_id:path}", tags=["models"])
async def show_model(request: Request, model_id: str) -> Model:
    """One of the names."""
    return _model(model_id, _served(request, model_id))


def _served(request: Request, name: str) -> ServedModel:
    served = serving_of(request).model
    if not served.accepts(name):
        names = ", ".join(served.names)
        raise ModelNotFoundError(f"there is no model of that name here; expected one of {names}")
    return served


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


class LmStudioModel(BaseModel):
    """A name that requests may use, as LM Studio's REST API v0 lists it."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm"] = "llm"
    publisher: str
    arch: str
    compatibility_type: Literal["mlx"] = "mlx"
    quantization: str
    state: Literal["loaded"] = "loaded"
    max_context_length: int
    loaded_context_length: int
    capabilities: list[Literal["tool_use"]] = ["tool_use"]


class LmStudioModels(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[LmStudioModel]


@router.get("/api/v0/models", tags=["models"])
async def list_as_lm_studio(request: Request) -> LmStudioModels:
    """The names that requests may use, as LM Studio lists its models."""
    served = serving_of(request).model
    return LmStudioModels(data=[_as_lm_studio(name, served) for name in served.names])


@router.get("/api/v0/models/{model_id:path}", tags=["models"])
async def show_as_lm_studio(request: Request, model_id: str) -> LmStudioModel:
    """One of the names, as LM Studio shows a model."""
    return _as_lm_studio(model_id, _served(request, model_id))


def _as_lm_studio(name: str, served: ServedModel) -> LmStudioModel:
    details = served.details
    publisher, slash, _ = name.partition("/")
    trained = None if details is None else details.trained_tokens
    return LmStudioModel(
        id=name,
        publisher=publisher if slash else _OWNER,
        arch="" if details is None else details.architecture,
        quantization="" if details is None else details.stored_as,
        max_context_length=trained or served.context_tokens,
        loaded_context_length=served.context_tokens,
    )


class Tokenize(BaseModel):
    """A text to tokenize. Other fields of vLLM's clients are ignored."""

    model_config = ConfigDict(extra="ignore")

    prompt: StrictStr
    model: StrictStr | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool | None = None


class Tokenized(BaseModel):
    """`token_strs` is the text of each token, if requested."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenize(BaseModel):
    """Tokens to decode."""

    model_config = ConfigDict(extra="ignore")

    tokens: list[StrictInt]
    model: StrictStr | None = None


class Detokenized(BaseModel):
    """The text of the tokens."""

    prompt: str


def _body(*schemas: dict[str, object]) -> dict[str, object]:
    """The OpenAPI description of a body that the route reads itself: any of `schemas`."""
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_CONVERSATION: Final[dict[str, object]] = {
    "type": "object",
    "description": "Messages, tools and template options as for chat completions.",
    "required": ["messages"],
    "properties": {
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["system", "user", "assistant"]},
                    "content": {"type": "string"},
                },
            },
        },
        "return_token_strs": {"type": ["boolean", "null"]},
    },
}


@router.post(
    "/tokenize", tags=["tokens"], openapi_extra=_body(Tokenize.model_json_schema(), _CONVERSATION)
)
async def tokenize(request: Request) -> Tokenized:
    """The tokens of a text, or of a conversation as a chat completion of this caller has them: with
    the tokens of known answers, the rest rendered by the chat template."""
    body = await read_json(request)
    serving = serving_of(request)
    if "messages" in body:
        chat = await to_thread.run_sync(conversation_of, body)
        tokens = await serving.tokenize(chat, tenant=tenant_of(request))
    else:
        parsed = await to_thread.run_sync(validated, _tokenize_adapter(), body)
        tokens = await serving.tokenize(parsed.prompt, add_special_tokens=parsed.add_special_tokens)
    texts = await serving.token_texts(tokens) if _with_texts(body) else None
    return Tokenized(
        tokens=list(tokens),
        count=len(tokens),
        max_model_len=serving.model.context_tokens,
        token_strs=None if texts is None else list(texts),
    )


def _with_texts(body: Mapping[str, object]) -> bool:
    flag = body.get("return_token_strs")
    if not isinstance(flag, bool | None):
        raise FieldError("return_token_strs: expected true or false", param="return_token_strs")
    return flag is True


@router.post("/detokenize", tags=["tokens"], openapi_extra=_body(Detokenize.model_json_schema()))
async def detokenize(request: Request) -> Detokenized:
    """The text of tokens."""
    parsed = await read_as(_detokenize_adapter(), request)
    return Detokenized(prompt=await serving_of(request).detokenize(parsed.tokens))


@cache
def _tokenize_adapter() -> TypeAdapter[Tokenize]:
    return TypeAdapter(Tokenize)


@cache
def _detokenize_adapter() -> TypeAdapter[Detokenize]:
    return TypeAdapter(Detokenize)
