"""/v1/models, /api/v0/models, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from semantic.application.models.model_names import unknown_model
from semantic.domain.errors import InvalidRequestError, ModelNotFoundError
from semantic.domain.value_objects import Lane
from semantic.ports.embedding import EmbeddingModel
from semantic.ports.models import ModelsPort, ModelState, ModelStatus
from semantic.ports.serving import ServedModel, ToolSupport
from semantic_server.http.context import context_of, serving_of, settings_of, until_disconnect
from semantic_server.http.errors import FieldError
from semantic_server.http.identity import is_operator, require_operator, tenant_of
from semantic_server.http.openai.chat import conversation_of
from semantic_server.http.openai.requests import check_model
from semantic_server.http.request_body import LazyAdapter, on_thread, read_as, read_json, validated

router: Final = APIRouter()

_OWNER: Final = "semantic"

AnyModel = ServedModel | EmbeddingModel


class Capabilities(BaseModel):
    """Capabilities of a model. `tools` says how prompts describe tools: in the form of the chat
    template, or as plain text if that form is unknown."""

    reasoning: bool
    tools: ToolSupport
    tool_call_parser: str
    exact_batch: Lane | None = None


class Model(BaseModel):
    """A name for requests. `max_model_len` and `context_length` are the same number."""

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
    state: Annotated[
        ModelState, Field(description="State, if the server has several models; requests load it.")
    ] = "loaded"
    memory_bytes: Annotated[
        int | None,
        Field(
            description="Bytes of weights and pool, on a server with several models. Shared "
            "weights count for the first loaded model."
        ),
    ] = None
    capabilities: Capabilities | None = None
    parent: Annotated[
        str | None, Field(description="Base model, if this one is an adapter on it.")
    ] = None
    pinned: Annotated[bool | None, Field(description="True if it stays loaded.")] = None
    running: Annotated[int | None, Field(description="Running requests; not for tenants.")] = None
    waiting: Annotated[
        int | None, Field(description="Requests that wait for the model; not for tenants.")
    ] = None
    expires_in: Annotated[
        float | None, Field(description="Seconds until the server unloads it if no request comes.")
    ] = None


class Models(BaseModel):
    """All names, or the first `limit` of them."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


@router.get("/v1/models", tags=["models"], response_model_exclude_none=True)
async def list_models(
    request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 1000
) -> Models:
    """Return all names for requests: the first model's id first, the embedding model's last."""
    found = [
        _model(request, name, served, status)
        for served, status in listed_models(request)
        for name in served.names
    ]
    listed = found[:limit]
    return Models(
        data=listed, has_more=limit < len(found), first_id=listed[0].id, last_id=listed[-1].id
    )


@router.get("/v1/models/{model_id:path}", tags=["models"], response_model_exclude_none=True)
async def show_model(request: Request, model_id: str) -> Model:
    """Return one of the names."""
    served, status = model_called(request, model_id)
    return _model(request, model_id, served, status)


def listed_models(request: Request) -> list[tuple[AnyModel, ModelStatus | None]]:
    """Return all models with their states, the embedding model last. The state of a model that
    never unloads is None."""
    context = context_of(request)
    first = serving_of(request).model
    rows: list[tuple[AnyModel, ModelStatus | None]] = [(first, None)]
    if context.models is not None:
        rows = [(one.served, one) for one in context.models.statuses()]
    embedding = context.embedding
    return rows if embedding is None else [*rows, (embedding.model, None)]


def model_called(request: Request, name: str) -> tuple[AnyModel, ModelStatus | None]:
    """Return the first model called `name` and its state. Raises ModelNotFoundError."""
    rows = listed_models(request)
    for served, status in rows:
        if served.accepts(name):
            return served, status
    raise ModelNotFoundError(unknown_model(name, [one for row in rows for one in row[0].names]))


def context_length(served: AnyModel) -> int:
    """Return the maximum number of tokens in a prompt plus its answer, or in a text to embed."""
    return served.context_tokens if isinstance(served, ServedModel) else served.max_tokens


@router.post("/v1/models/{model_id:path}/load", tags=["models"], response_model_exclude_none=True)
async def load_model(request: Request, model_id: str) -> Model:
    """Load one of several models unless it is loaded. A server with keys requires an operator's
    key."""
    return await _changed(request, model_id, lambda models: models.load(model_id))


@router.post("/v1/models/{model_id:path}/unload", tags=["models"], response_model_exclude_none=True)
async def unload_model(request: Request, model_id: str) -> Model:
    """Unload one of several models once its requests have finished; its agents stay in the store. A
    server with keys requires an operator's key."""
    return await _changed(request, model_id, lambda models: models.unload(model_id))


async def _changed(
    request: Request,
    model_id: str,
    change: Callable[[ModelsPort], Coroutine[object, object, ModelStatus]],
) -> Model:
    if settings_of(request).api_keys:
        require_operator(request, "models belong to all tenants")
    check_model(model_id, serving_of(request, model_id).model)
    models = context_of(request).models
    if models is None:
        raise InvalidRequestError(
            "cannot load or unload the only model of this server: expected a server with several "
            "models, or with --model-ttl"
        )
    await request.body()
    status = await until_disconnect(request, change(models))
    return _model(request, model_id, status.served, status)


def _sees_load(request: Request) -> bool:
    return is_operator(request) or not settings_of(request).api_keys


def _model(
    request: Request, name: str, served: AnyModel, status: ModelStatus | None = None
) -> Model:
    tokens = context_length(served)
    model = Model(
        id=name,
        display_name=name,
        created=served.created,
        created_at=datetime.fromtimestamp(served.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_model_len=tokens,
        context_length=tokens,
        max_input_tokens=tokens - 1,
        parent=served.parent if isinstance(served, ServedModel) else None,
    )
    details = served.details if "anthropic-version" not in request.headers else None
    if isinstance(served, ServedModel) and details is not None:  # Anthropic's differ
        model.capabilities = Capabilities(
            reasoning=details.thinks,
            tools=details.tools,
            tool_call_parser=details.call_parser,
            exact_batch=details.lane,
        )
    if status is not None:
        model.state, model.memory_bytes = status.state, status.n_bytes
        model.pinned, model.expires_in = status.pinned, status.expires_in
        if _sees_load(request):
            model.running, model.waiting = status.running, status.waiting
    return model


class LmStudioModel(BaseModel):
    """A name that requests may use, as LM Studio's REST API v0 lists it."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm", "embeddings"]
    publisher: str
    arch: str
    compatibility_type: Literal["mlx"] = "mlx"
    quantization: str
    state: Literal["loaded", "not-loaded"]
    max_context_length: int
    loaded_context_length: int
    capabilities: list[Literal["tool_use"]]


class LmStudioModels(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[LmStudioModel]


@router.get("/api/v0/models", tags=["models"])
async def list_as_lm_studio(request: Request) -> LmStudioModels:
    """Return the names that requests may use, as LM Studio lists its models."""
    rows = listed_models(request)
    data = [_as_lm_studio(name, served, status) for served, status in rows for name in served.names]
    return LmStudioModels(data=data)


@router.get("/api/v0/models/{model_id:path}", tags=["models"])
async def show_as_lm_studio(request: Request, model_id: str) -> LmStudioModel:
    """Return one of the names, as LM Studio shows a model."""
    return _as_lm_studio(model_id, *model_called(request, model_id))


def is_loaded(status: ModelStatus | None) -> bool:
    """Return True if the model is in memory. `status` is None for a model that never unloads."""
    return status is None or status.state == "loaded"


def _as_lm_studio(name: str, served: AnyModel, status: ModelStatus | None) -> LmStudioModel:
    answers = isinstance(served, ServedModel)
    details = served.details
    publisher, slash, _ = name.partition("/")
    trained = None if details is None else details.trained_tokens
    return LmStudioModel(
        id=name,
        type="llm" if answers else "embeddings",
        publisher=publisher if slash else _OWNER,
        arch="" if details is None else details.architecture,
        quantization="" if details is None else details.stored_as,
        state="loaded" if is_loaded(status) else "not-loaded",
        max_context_length=trained or context_length(served),
        loaded_context_length=context_length(served),
        capabilities=["tool_use"] if answers else [],
    )


class Tokenize(BaseModel):
    """A text to tokenize. The route ignores other fields of vLLM's clients."""

    model_config = ConfigDict(extra="ignore")

    prompt: StrictStr
    model: StrictStr | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool | None = None


class Tokenized(BaseModel):
    """The tokens; `token_strs` has the text of each, if requested."""

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
    """Return the tokens of a text, or of a conversation as in this caller's chat completions: known
    answers keep their tokens, and the chat template gives the rest."""
    body = await read_json(request)
    serving, tenant = serving_of(request, body.get("model")), tenant_of(request)
    if "messages" in body:
        chat = await on_thread(request, conversation_of, body)
        tokens = await serving.tokenize(chat, tenant=tenant)
    else:
        parsed = await on_thread(request, validated, _tokenize_adapter(), body)
        prompt, special = parsed.prompt, parsed.add_special_tokens
        tokens = await serving.tokenize(prompt, add_special_tokens=special, tenant=tenant)
    texts = await serving.token_texts(tokens, tenant) if _with_texts(body) else None
    return Tokenized(
        tokens=list(tokens),
        count=len(tokens),
        max_model_len=serving.model.context_tokens,
        token_strs=None if texts is None else list(texts),
    )


def _with_texts(body: Mapping[str, object]) -> bool:
    flag = body.get("return_token_strs")
    if not isinstance(flag, bool | None):
        raise FieldError("return_token_strs must be true or false", param="return_token_strs")
    return flag is True


@router.post("/detokenize", tags=["tokens"], openapi_extra=_body(Detokenize.model_json_schema()))
async def detokenize(request: Request) -> Detokenized:
    """Return the text of tokens."""
    parsed = await read_as(_detokenize_adapter(), request)
    text = serving_of(request, parsed.model).detokenize(parsed.tokens, tenant_of(request))
    return Detokenized(prompt=await text)


_tokenize_adapter: Final = LazyAdapter(Tokenize)
_detokenize_adapter: Final = LazyAdapter(Detokenize)
