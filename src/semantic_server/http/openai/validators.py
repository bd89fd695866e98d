"""Pydantic validators for OpenAI's own request types, with the extensions of local servers.

Each is built when it is first needed, which takes milliseconds. Validation is strict: a string is
no number. Lists and unions that OpenAI's types leave lazy are validated element by element; see
`fields.without_elements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from semantic_server.http.openai.request_types import (
    ChatCompletionAllowedToolChoiceParam,
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionParams,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
    CompletionParams,
    FunctionToolParam,
    ResponseCustomToolCallParam,
    ResponseFormatJSONObject,
    ResponseFormatJSONSchema,
    ResponseFormatText,
    ResponseFormatTextJSONSchemaConfigParam,
    ResponseFunctionToolCallParam,
    ResponseParams,
    ResponseReasoningItemParam,
)

_STRICT: Final = ConfigDict(strict=True)


class Extensions(TypedDict, total=False):
    """Fields outside of OpenAI's API that every body may have."""

    stream: bool
    agent_id: str
    ignore_eos: bool
    min_p: float
    min_tokens: int
    repetition_penalty: float
    semantic: dict[str, object]
    top_k: int


class Constraints(TypedDict, total=False):
    """What constrains an answer, as in vLLM; read by `requests.constraint_of`."""

    structured_outputs: dict[str, object]
    guided_json: dict[str, object] | str
    guided_regex: str
    guided_choice: list[str]
    guided_grammar: str


@with_config(_STRICT)
class ChatBody(ChatCompletionParams, Extensions, Constraints, total=False):
    """The body of POST /v1/chat/completions."""

    chat_template_kwargs: dict[str, object]


@with_config(_STRICT)
class CompletionBody(CompletionParams, Extensions, Constraints, total=False):
    """The body of POST /v1/completions."""


@with_config(_STRICT)
class ResponseBody(ResponseParams, Extensions, total=False):
    """The body of POST /v1/responses."""

    frequency_penalty: float
    logit_bias: dict[str, int]
    presence_penalty: float
    seed: int


@lru_cache(maxsize=1)
def chat_adapter() -> TypeAdapter[ChatBody]:
    """Validates the body of a chat completion."""
    return TypeAdapter(ChatBody)


@lru_cache(maxsize=1)
def completion_adapter() -> TypeAdapter[CompletionBody]:
    """Validates the body of a completion."""
    return TypeAdapter(CompletionBody)


@lru_cache(maxsize=1)
def response_adapter() -> TypeAdapter[ResponseBody]:
    """Validates the body of a response."""
    return TypeAdapter(ResponseBody)


# Elements of a chat completion's body

_Message = (
    ChatCompletionAssistantMessageParam
    | ChatCompletionDeveloperMessageParam
    | ChatCompletionSystemMessageParam
    | ChatCompletionToolMessageParam
    | ChatCompletionUserMessageParam
)

_Format = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatJSONSchema


@lru_cache(maxsize=1)
def message_adapters() -> Mapping[str, TypeAdapter[_Message]]:
    """Validate a message, by role; its content and tool calls stay lazy."""
    kinds: dict[str, type[_Message]] = {
        "assistant": ChatCompletionAssistantMessageParam,
        "developer": ChatCompletionDeveloperMessageParam,
        "system": ChatCompletionSystemMessageParam,
        "tool": ChatCompletionToolMessageParam,
        "user": ChatCompletionUserMessageParam,
    }
    return {role: TypeAdapter(kind) for role, kind in kinds.items()}


@lru_cache(maxsize=1)
def tool_call_adapter() -> TypeAdapter[ChatCompletionMessageFunctionToolCallParam]:
    """Validates a tool call of an assistant message."""
    return TypeAdapter(ChatCompletionMessageFunctionToolCallParam)


@lru_cache(maxsize=1)
def tool_adapter() -> TypeAdapter[ChatCompletionFunctionToolParam]:
    """Validates a function tool."""
    return TypeAdapter(ChatCompletionFunctionToolParam)


@lru_cache(maxsize=1)
def named_choice_adapter() -> TypeAdapter[ChatCompletionNamedToolChoiceParam]:
    """Validates the choice of one tool."""
    return TypeAdapter(ChatCompletionNamedToolChoiceParam)


@lru_cache(maxsize=1)
def allowed_choice_adapter() -> TypeAdapter[ChatCompletionAllowedToolChoiceParam]:
    """Validates a choice among allowed tools; the tools stay lazy."""
    return TypeAdapter(ChatCompletionAllowedToolChoiceParam)


@lru_cache(maxsize=1)
def format_adapters() -> Mapping[str, TypeAdapter[_Format]]:
    """Validate `response_format`, by type."""
    kinds: dict[str, type[_Format]] = {
        "text": ResponseFormatText,
        "json_object": ResponseFormatJSONObject,
        "json_schema": ResponseFormatJSONSchema,
    }
    return {name: TypeAdapter(kind) for name, kind in kinds.items()}


# Elements of a response's body

_TextFormat = (
    ResponseFormatText | ResponseFormatJSONObject | ResponseFormatTextJSONSchemaConfigParam
)


@lru_cache(maxsize=1)
def response_tool_adapter() -> TypeAdapter[FunctionToolParam]:
    """Validates a function tool."""
    return TypeAdapter(FunctionToolParam)


@lru_cache(maxsize=1)
def function_call_adapter() -> TypeAdapter[ResponseFunctionToolCallParam]:
    """Validates an input item of type `function_call`."""
    return TypeAdapter(ResponseFunctionToolCallParam)


@lru_cache(maxsize=1)
def custom_call_adapter() -> TypeAdapter[ResponseCustomToolCallParam]:
    """Validates an input item of type `custom_tool_call`."""
    return TypeAdapter(ResponseCustomToolCallParam)


@lru_cache(maxsize=1)
def reasoning_adapter() -> TypeAdapter[ResponseReasoningItemParam]:
    """Validates an input item of type `reasoning`; its texts stay lazy."""
    return TypeAdapter(ResponseReasoningItemParam)


@lru_cache(maxsize=1)
def text_format_adapters() -> Mapping[str, TypeAdapter[_TextFormat]]:
    """Validate `text.format`, by type."""
    kinds: dict[str, type[_TextFormat]] = {
        "text": ResponseFormatText,
        "json_object": ResponseFormatJSONObject,
        "json_schema": ResponseFormatTextJSONSchemaConfigParam,
    }
    return {name: TypeAdapter(kind) for name, kind in kinds.items()}
