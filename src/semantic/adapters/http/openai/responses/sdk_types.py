"""OpenAI's own types of the parts of a request that are checked one by one.

Importing this imports OpenAI's SDK, which takes its time: only requests do it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from openai.types.responses import (
    FunctionToolParam,
    ResponseFormatTextJSONSchemaConfigParam,
    ResponseFunctionToolCallParam,
)
from openai.types.responses.response_custom_tool_call_param import ResponseCustomToolCallParam
from openai.types.responses.response_reasoning_item_param import ResponseReasoningItemParam
from openai.types.shared_params import ResponseFormatJSONObject, ResponseFormatText
from pydantic import TypeAdapter

Format = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatTextJSONSchemaConfigParam


@lru_cache(maxsize=1)
def tool_adapter() -> TypeAdapter[FunctionToolParam]:
    """Validates a function that a model may call."""
    return TypeAdapter(FunctionToolParam)


@lru_cache(maxsize=1)
def call_adapter() -> TypeAdapter[ResponseFunctionToolCallParam]:
    """Validates a call that an assistant made."""
    return TypeAdapter(ResponseFunctionToolCallParam)


@lru_cache(maxsize=1)
def custom_call_adapter() -> TypeAdapter[ResponseCustomToolCallParam]:
    """Validates a call of a tool whose input is a text."""
    return TypeAdapter(ResponseCustomToolCallParam)


@lru_cache(maxsize=1)
def reasoning_adapter() -> TypeAdapter[ResponseReasoningItemParam]:
    """Validates a thought that comes back; its texts are left lazy."""
    return TypeAdapter(ResponseReasoningItemParam)


@lru_cache(maxsize=1)
def format_adapters() -> Mapping[str, TypeAdapter[Format]]:
    """Validates what an answer must look like, by its type."""
    kinds: dict[str, type[Format]] = {
        "text": ResponseFormatText,
        "json_object": ResponseFormatJSONObject,
        "json_schema": ResponseFormatTextJSONSchemaConfigParam,
    }
    return {name: TypeAdapter(kind) for name, kind in kinds.items()}
