"""Types of OpenAI's SDK that validate requests.

Written by `python -m tools.request_types` from version 3.52.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Required

from typing_extensions import TypedDict


class ChatCompletionPredictionContentParam(TypedDict, total=False):
    content: Required[str | Iterable[object]]
    type: Required[Literal["content"]]


class PromptCacheOptions(TypedDict, total=False):
    mode: Literal["implicit", "explicit"]
    ttl: Literal["30m"]


class ChatCompletionStreamOptionsParam(TypedDict, total=False):
    include_obfuscation: bool
    include_usage: bool


class ChatCompletionParams(TypedDict, total=False):
    messages: Required[object]
    model: Required[str]
    audio: object
    frequency_penalty: float | None
    function_call: object
    functions: object
    logit_bias: dict[str, int] | None
    logprobs: bool | None
    max_completion_tokens: int | None
    max_tokens: int | None
    metadata: dict[str, str] | None
    modalities: list[Literal["text", "audio"]] | None
    moderation: object
    n: int | None
    parallel_tool_calls: bool
    prediction: ChatCompletionPredictionContentParam | None
    presence_penalty: float | None
    prompt_cache_key: str | None
    prompt_cache_options: PromptCacheOptions
    prompt_cache_retention: Literal["in_memory", "24h"] | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    response_format: object
    safety_identifier: str | None
    seed: int | None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None
    stop: object
    store: bool | None
    stream_options: ChatCompletionStreamOptionsParam | None
    temperature: float | None
    tool_choice: object
    tools: object
    top_logprobs: int | None
    top_p: float | None
    user: str
    verbosity: Literal["low", "medium", "high"] | None
    web_search_options: object


class CompletionParams(TypedDict, total=False):
    model: Required[str]
    prompt: Required[object]
    best_of: int | None
    echo: bool | None
    frequency_penalty: float | None
    logit_bias: dict[str, int] | None
    logprobs: int | None
    max_tokens: int | None
    n: int | None
    presence_penalty: float | None
    seed: int | None
    stop: object
    stream_options: ChatCompletionStreamOptionsParam | None
    suffix: str | None
    temperature: float | None
    top_p: float | None
    user: str


class Image(TypedDict, total=False):
    context_compression: Literal["auto", "enabled", "disabled"]


class ResponseParamsPromptCacheOptions(TypedDict, total=False):
    comparison_response_id: str | None
    mode: Literal["implicit", "explicit"]
    prewarm: bool
    ttl: Literal["30m", "12h"]


class Reasoning(TypedDict, total=False):
    context: Literal["auto", "current_turn", "all_turns"] | None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    generate_summary: Literal["auto", "concise", "detailed"] | None
    mode: str
    summary: Literal["auto", "concise", "detailed"] | None


class ResponseParams(TypedDict, total=False):
    access_programs: object
    background: bool | None
    context_management: Iterable[object] | None
    conversation: object
    image: Image
    include: object
    input: object
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str] | None
    model: str
    moderation: object
    parallel_tool_calls: bool | None
    previous_response_id: str | None
    prompt: object
    prompt_cache_key: str | None
    prompt_cache_options: ResponseParamsPromptCacheOptions
    prompt_cache_retention: Literal["in_memory", "24h"] | None
    reasoning: Reasoning | None
    safety_identifier: str | None
    service_tier: (
        Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None
    )
    store: bool | None
    stream_options: object
    temperature: float | None
    text: object
    tool_choice: object
    tools: object
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["auto", "disabled"] | None
    user: str


class ChatCompletionAllowedToolsParam(TypedDict, total=False):
    mode: Required[Literal["auto", "required"]]
    tools: Required[Iterable[object]]


class ChatCompletionAllowedToolChoiceParam(TypedDict, total=False):
    allowed_tools: Required[ChatCompletionAllowedToolsParam]
    type: Required[Literal["allowed_tools"]]


class Audio(TypedDict, total=False):
    id: Required[str]


class FunctionCall(TypedDict, total=False):
    arguments: Required[str]
    name: Required[str]


class ChatCompletionAssistantMessageParam(TypedDict, total=False):
    role: Required[Literal["assistant"]]
    audio: Audio | None
    content: str | Iterable[object] | None
    function_call: FunctionCall | None
    name: str
    refusal: str | None
    tool_calls: Iterable[object]


class ChatCompletionDeveloperMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[object]]
    role: Required[Literal["developer"]]
    name: str


class FunctionDefinition(TypedDict, total=False):
    name: Required[str]
    description: str
    parameters: dict[str, object]
    strict: bool | None


class ChatCompletionFunctionToolParam(TypedDict, total=False):
    function: Required[FunctionDefinition]
    type: Required[Literal["function"]]


class Function(TypedDict, total=False):
    arguments: Required[str]
    name: Required[str]


class ChatCompletionMessageFunctionToolCallParam(TypedDict, total=False):
    id: Required[str]
    function: Required[Function]
    type: Required[Literal["function"]]


class ChatCompletionNamedToolChoiceParamFunction(TypedDict, total=False):
    name: Required[str]


class ChatCompletionNamedToolChoiceParam(TypedDict, total=False):
    function: Required[ChatCompletionNamedToolChoiceParamFunction]
    type: Required[Literal["function"]]


class ChatCompletionSystemMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[object]]
    role: Required[Literal["system"]]
    name: str


class ChatCompletionToolMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[object]]
    role: Required[Literal["tool"]]
    tool_call_id: Required[str]


class ChatCompletionUserMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[object]]
    role: Required[Literal["user"]]
    name: str


_FunctionToolParamKeywords = TypedDict("_FunctionToolParamKeywords", {"async": bool}, total=False)


class FunctionToolParam(_FunctionToolParamKeywords, total=False):
    name: Required[str]
    parameters: Required[dict[str, object] | None]
    strict: Required[bool | None]
    type: Required[Literal["function"]]
    allowed_callers: list[Literal["direct", "programmatic"]] | None
    defer_loading: bool
    description: str | None
    output_schema: dict[str, object] | None


class ResponseFormatTextJSONSchemaConfigParam(TypedDict, total=False):
    name: Required[str]
    schema: Required[dict[str, object]]
    type: Required[Literal["json_schema"]]
    description: str
    strict: bool | None


class CallerDirect(TypedDict, total=False):
    type: Required[Literal["direct"]]


class CallerProgram(TypedDict, total=False):
    caller_id: Required[str]
    type: Required[Literal["program"]]


_ResponseFunctionToolCallParamKeywords = TypedDict(
    "_ResponseFunctionToolCallParamKeywords", {"async": bool}, total=False
)


class ResponseFunctionToolCallParam(_ResponseFunctionToolCallParamKeywords, total=False):
    arguments: Required[str]
    call_id: Required[str]
    name: Required[str]
    type: Required[Literal["function_call"]]
    id: str
    caller: CallerDirect | CallerProgram | None
    namespace: str
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseCustomToolCallParamCallerDirect(TypedDict, total=False):
    type: Required[Literal["direct"]]


class ResponseCustomToolCallParamCallerProgram(TypedDict, total=False):
    caller_id: Required[str]
    type: Required[Literal["program"]]


_ResponseCustomToolCallParamKeywords = TypedDict(
    "_ResponseCustomToolCallParamKeywords", {"async": bool}, total=False
)


class ResponseCustomToolCallParam(_ResponseCustomToolCallParamKeywords, total=False):
    call_id: Required[str]
    input: Required[str]
    name: Required[str]
    type: Required[Literal["custom_tool_call"]]
    id: str
    caller: (
        ResponseCustomToolCallParamCallerDirect | ResponseCustomToolCallParamCallerProgram | None
    )
    namespace: str


class ResponseReasoningItemParam(TypedDict, total=False):
    id: Required[str]
    summary: Required[Iterable[object]]
    type: Required[Literal["reasoning"]]
    content: Iterable[object]
    encrypted_content: str | None
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseFormatJSONObject(TypedDict, total=False):
    type: Required[Literal["json_object"]]


class JSONSchema(TypedDict, total=False):
    name: Required[str]
    description: str
    schema: dict[str, object]
    strict: bool | None


class ResponseFormatJSONSchema(TypedDict, total=False):
    json_schema: Required[JSONSchema]
    type: Required[Literal["json_schema"]]


class ResponseFormatText(TypedDict, total=False):
    type: Required[Literal["text"]]
