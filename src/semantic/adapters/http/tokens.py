"""/tokenize and /detokenize: what a text is in tokens, and back, in the shape of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr, TypeAdapter

from semantic.adapters.http.bodies import read_json, validated
from semantic.adapters.http.context import serving_of
from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.openai.chat_messages import messages_of
from semantic.adapters.http.openai.chat_tools import tools_of
from semantic.domain.chat import Chat

router: Final = APIRouter(tags=["tokens"])


class Tokenize(BaseModel):
    """A text to count. Other fields of vLLM's clients are let be."""

    model_config = ConfigDict(extra="ignore")

    prompt: StrictStr
    model: StrictStr | None = None
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool | None = None


class Tokenized(BaseModel):
    """`token_strs` is the text of each token, where it was asked for."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenize(BaseModel):
    """Tokens to read."""

    model_config = ConfigDict(extra="ignore")

    tokens: list[StrictInt]
    model: StrictStr | None = None


class Detokenized(BaseModel):
    """The text of the tokens."""

    prompt: str


def _body(*schemas: dict[str, object]) -> dict[str, object]:
    """The body of a route that reads it itself, for its description: as one of `schemas`."""
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_CONVERSATION: Final[dict[str, object]] = {
    "type": "object",
    "description": "Messages and tools as for chat completions.",
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


@router.post("/tokenize", openapi_extra=_body(Tokenize.model_json_schema(), _CONVERSATION))
async def tokenize(request: Request) -> Tokenized:
    """The tokens of a text, or of a conversation as the model is shown it."""
    body = await read_json(request)
    serving = serving_of(request)
    if "messages" in body:
        given = body.get("tools")
        tools = tools_of([] if given is None else given)
        tokens = await serving.tokenize(Chat(messages_of(body["messages"]), tools))
    else:
        asked = validated(_tokenize_adapter(), body)
        tokens = await serving.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens)
    texts = await serving.token_texts(tokens) if _wants_texts(body) else None
    return Tokenized(
        tokens=list(tokens),
        count=len(tokens),
        max_model_len=serving.model.context_tokens,
        token_strs=None if texts is None else list(texts),
    )


def _wants_texts(body: Mapping[str, object]) -> bool:
    wanted = body.get("return_token_strs")
    if not isinstance(wanted, bool | None):
        raise FieldError("return_token_strs: expected true or false", param="return_token_strs")
    return wanted is True


@router.post("/detokenize", openapi_extra=_body(Detokenize.model_json_schema()))
async def detokenize(request: Request) -> Detokenized:
    """The text of tokens."""
    asked = validated(_detokenize_adapter(), await read_json(request))
    return Detokenized(prompt=await serving_of(request).detokenize(asked.tokens))


@cache
def _tokenize_adapter() -> TypeAdapter[Tokenize]:
    return TypeAdapter(Tokenize)


@cache
def _detokenize_adapter() -> TypeAdapter[Detokenize]:
    return TypeAdapter(Detokenize)
