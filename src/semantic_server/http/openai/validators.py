"""Validators of OpenAI's request types. Validation is strict: a string is not a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import ConfigDict, with_config
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
from semantic_server.http.request_body import LazyAdapter

_STRICT: Final = ConfigDict(strict=True)


class Extensions(TypedDict, total=False):
    """Fields outside of OpenAI's API that the body of every route may have."""

    stream: bool
    agent_id: str
    ignore_eos: bool
    min_p: float
    min_tokens: int
    repetition_penalty: float
    semantic: dict[str, object]
    top_k: int


class Constraints(TypedDict, total=False):
    """Fields of vLLM that constrain an answer."""

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


chat_adapter: Final = LazyAdapter(ChatBody)
completion_adapter: Final = LazyAdapter(CompletionBody)
response_adapter: Final = LazyAdapter(ResponseBody)


# Elements of a chat completion's body

_Message = (
    ChatCompletionAssistantMessageParam
    | ChatCompletionDeveloperMessageParam
    | ChatCompletionSystemMessageParam
    | ChatCompletionToolMessageParam
    | ChatCompletionUserMessageParam
)
_MESSAGES: Final[Mapping[str, type[_Message]]] = {
    "assistant": ChatCompletionAssistantMessageParam,
    "developer": ChatCompletionDeveloperMessageParam,
    "system": ChatCompletionSystemMessageParam,
    "tool": ChatCompletionToolMessageParam,
    "user": ChatCompletionUserMessageParam,
}
message_adapters: Final = {role: LazyAdapter(kind) for role, kind in _MESSAGES.items()}
"""Validators of messages, by role."""

_Format = ResponseFormatText | ResponseFormatJSONObject | ResponseFormatJSONSchema
_FORMATS: Final[Mapping[str, type[_Format]]] = {
    "text": ResponseFormatText,
    "json_object": ResponseFormatJSONObject,
    "json_schema": ResponseFormatJSONSchema,
}
format_adapters: Final = {name: LazyAdapter(kind) for name, kind in _FORMATS.items()}
"""Validators of `response_format`, by type."""

tool_adapter: Final = LazyAdapter(ChatCompletionFunctionToolParam)
tool_call_adapter: Final = LazyAdapter(ChatCompletionMessageFunctionToolCallParam)
named_choice_adapter: Final = LazyAdapter(ChatCompletionNamedToolChoiceParam)
allowed_choice_adapter: Final = LazyAdapter(ChatCompletionAllowedToolChoiceParam)
"""Validator of a tool choice among several allowed tools."""


# Elements of a response's body

response_tool_adapter: Final = LazyAdapter(FunctionToolParam)
function_call_adapter: Final = LazyAdapter(ResponseFunctionToolCallParam)
custom_call_adapter: Final = LazyAdapter(ResponseCustomToolCallParam)
reasoning_adapter: Final = LazyAdapter(ResponseReasoningItemParam)
"""Validator of an input item of type `reasoning`."""

_TextFormat = (
    ResponseFormatText | ResponseFormatJSONObject | ResponseFormatTextJSONSchemaConfigParam
)
_TEXT_FORMATS: Final[Mapping[str, type[_TextFormat]]] = {
    "text": ResponseFormatText,
    "json_object": ResponseFormatJSONObject,
    "json_schema": ResponseFormatTextJSONSchemaConfigParam,
}
text_format_adapters: Final = {name: LazyAdapter(kind) for name, kind in _TEXT_FORMATS.items()}
"""Validators of `text.format`, by type."""
