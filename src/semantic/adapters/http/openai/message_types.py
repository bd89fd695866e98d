"""OpenAI's own types of the parts of a chat that are checked one by one, so that errors name them.

Importing this imports OpenAI's SDK; only requests do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from openai.types.chat import (
    ChatCompletionAllowedToolChoiceParam,
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.shared_params import (
    ResponseFormatJSONObject,
    ResponseFormatJSONSchema,
    ResponseFormatText,
)
from pydantic import TypeAdapter

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
    """Validates a message, by its role; its content and calls are left lazy."""
    kinds: dict[str, type[_Message]] = {
        "assistant": ChatCompletionAssistantMessageParam,
        "developer": ChatCompletionDeveloperMessageParam,
        "system": ChatCompletionSystemMessageParam,
        "tool": ChatCompletionToolMessageParam,
        "user": ChatCompletionUserMessageParam,
    }
    return {role: TypeAdapter(kind) for role, kind in kinds.items()}


@lru_cache(maxsize=1)
def call_adapter() -> TypeAdapter[ChatCompletionMessageFunctionToolCallParam]:
    """Validates a call that an assistant made."""
    return TypeAdapter(ChatCompletionMessageFunctionToolCallParam)


@lru_cache(maxsize=1)
def tool_adapter() -> TypeAdapter[ChatCompletionFunctionToolParam]:
    """Validates a function that a model may call."""
    return TypeAdapter(ChatCompletionFunctionToolParam)


@lru_cache(maxsize=1)
def named_choice_adapter() -> TypeAdapter[ChatCompletionNamedToolChoiceParam]:
    """Validates the choice of one tool."""
    return TypeAdapter(ChatCompletionNamedToolChoiceParam)


@lru_cache(maxsize=1)
def allowed_choice_adapter() -> TypeAdapter[ChatCompletionAllowedToolChoiceParam]:
    """Validates the choice among some of the tools; the tools themselves are left lazy."""
    return TypeAdapter(ChatCompletionAllowedToolChoiceParam)


@lru_cache(maxsize=1)
def format_adapters() -> Mapping[str, TypeAdapter[_Format]]:
    """Validates what an answer must look like, by its type."""
    kinds: dict[str, type[_Format]] = {
        "text": ResponseFormatText,
        "json_object": ResponseFormatJSONObject,
        "json_schema": ResponseFormatJSONSchema,
    }
    return {name: TypeAdapter(kind) for name, kind in kinds.items()}
