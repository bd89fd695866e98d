"""Types of Anthropic's SDK that validate requests.

Written by `python -m tools.request_types` from version 2.11.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, Required

from typing_extensions import TypedDict


class BetaBillingPolicyParam(TypedDict, total=False):
    type: Required[Literal["billing_policy"]]
    bill_to: Literal["self", "user_profile"]


class BetaCacheControlEphemeralParam(TypedDict, total=False):
    type: Required[Literal["ephemeral"]]
    ttl: Literal["5m", "1h"]


class BetaContextManagementConfigParam(TypedDict, total=False):
    edits: Iterable[object]


class BetaDiagnosticsParam(TypedDict, total=False):
    previous_message_id: str | None


class BetaFallbackCreditTokenParam(TypedDict, total=False):
    token: Required[str]
    mode: Literal["strict", "best_effort"]


class BetaMetadataParam(TypedDict, total=False):
    user_id: str | None


class BetaJSONOutputFormatParam(TypedDict, total=False):
    schema: Required[dict[str, object]]
    type: Required[Literal["json_schema"]]


class BetaTokenTaskBudgetParam(TypedDict, total=False):
    total: Required[int]
    type: Required[Literal["tokens"]]
    remaining: int | None


class BetaOutputConfigParam(TypedDict, total=False):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None
    format: BetaJSONOutputFormatParam | None
    task_budget: BetaTokenTaskBudgetParam | None


class BetaThinkingBlockBindingParam(TypedDict, total=False):
    prefix_mismatch_behavior: Literal["error", "drop_block"] | None


class BetaThinkingConfigEnabledParam(TypedDict, total=False):
    budget_tokens: Required[int]
    type: Required[Literal["enabled"]]
    block_binding: BetaThinkingBlockBindingParam | None
    display: Literal["summarized", "omitted", "updates"] | None


class BetaThinkingConfigDisabledParam(TypedDict, total=False):
    type: Required[Literal["disabled"]]


class BetaThinkingConfigBetweenToolsParam(TypedDict, total=False):
    type: Required[Literal["between_tools"]]


class BetaThinkingConfigAdaptiveParam(TypedDict, total=False):
    type: Required[Literal["adaptive"]]
    block_binding: BetaThinkingBlockBindingParam | None
    display: Literal["summarized", "omitted", "updates"] | None


class BetaToolChoiceAutoParam(TypedDict, total=False):
    type: Required[Literal["auto"]]
    disable_parallel_tool_use: bool


class BetaToolChoiceAnyParam(TypedDict, total=False):
    type: Required[Literal["any"]]
    disable_parallel_tool_use: bool


class BetaToolChoiceToolParam(TypedDict, total=False):
    name: Required[str]
    type: Required[Literal["tool"]]
    disable_parallel_tool_use: bool


class BetaToolChoiceNoneParam(TypedDict, total=False):
    type: Required[Literal["none"]]


class MessageCreateParams(TypedDict, total=False):
    max_tokens: Required[int]
    messages: Required[Iterable[object]]
    model: Required[str]
    billing_policy: BetaBillingPolicyParam | None
    cache_control: BetaCacheControlEphemeralParam | None
    compaction: object
    container: object
    context_management: BetaContextManagementConfigParam | None
    diagnostics: BetaDiagnosticsParam | None
    fallback_credit_token: str | BetaFallbackCreditTokenParam | None
    fallbacks: Iterable[object] | Literal["default"] | None
    inference_geo: str | None
    mcp_servers: Iterable[object]
    metadata: BetaMetadataParam
    output_config: BetaOutputConfigParam
    service_tier: Literal["auto", "standard_only"]
    speed: Literal["fast", "standard"] | None
    stop_sequences: Sequence[str]
    system: str | Iterable[object]
    thinking: (
        BetaThinkingConfigEnabledParam
        | BetaThinkingConfigDisabledParam
        | BetaThinkingConfigBetweenToolsParam
        | BetaThinkingConfigAdaptiveParam
    )
    thread: object
    tool_choice: (
        BetaToolChoiceAutoParam
        | BetaToolChoiceAnyParam
        | BetaToolChoiceToolParam
        | BetaToolChoiceNoneParam
    )
    tools: Iterable[object]
    betas: list[str]
    user_profile_id: str
    workspace_id: str


class MessageCountTokensParams(TypedDict, total=False):
    messages: Required[Iterable[object]]
    model: Required[str]
    billing_policy: BetaBillingPolicyParam | None
    cache_control: BetaCacheControlEphemeralParam | None
    compaction: object
    context_management: BetaContextManagementConfigParam | None
    mcp_servers: Iterable[object]
    output_config: BetaOutputConfigParam
    speed: Literal["fast", "standard"] | None
    system: str | Iterable[object]
    thinking: (
        BetaThinkingConfigEnabledParam
        | BetaThinkingConfigDisabledParam
        | BetaThinkingConfigBetweenToolsParam
        | BetaThinkingConfigAdaptiveParam
    )
    tool_choice: (
        BetaToolChoiceAutoParam
        | BetaToolChoiceAnyParam
        | BetaToolChoiceToolParam
        | BetaToolChoiceNoneParam
    )
    tools: Iterable[object]
    betas: list[str]
    user_profile_id: str
    workspace_id: str


class BetaTextBlockParam(TypedDict, total=False):
    text: Required[str]
    type: Required[Literal["text"]]
    cache_control: BetaCacheControlEphemeralParam | None
    citations: Iterable[object] | None


class BetaThinkingBlockParam(TypedDict, total=False):
    signature: Required[str]
    thinking: Required[str]
    type: Required[Literal["thinking"]]


class BetaRedactedThinkingBlockParam(TypedDict, total=False):
    data: Required[str]
    type: Required[Literal["redacted_thinking"]]


class BetaDirectCallerParam(TypedDict, total=False):
    type: Required[Literal["direct"]]


class BetaServerToolCallerParam(TypedDict, total=False):
    tool_id: Required[str]
    type: Required[Literal["code_execution_20250825"]]


class BetaServerToolCaller20260120Param(TypedDict, total=False):
    tool_id: Required[str]
    type: Required[Literal["code_execution_20260120"]]


class BetaToolUseBlockParam(TypedDict, total=False):
    id: Required[str]
    input: Required[dict[str, object]]
    name: Required[str]
    type: Required[Literal["tool_use"]]
    cache_control: BetaCacheControlEphemeralParam | None
    caller: BetaDirectCallerParam | BetaServerToolCallerParam | BetaServerToolCaller20260120Param
    toolset_name: str | None


class BetaToolResultBlockParam(TypedDict, total=False):
    tool_use_id: Required[str]
    type: Required[Literal["tool_result"]]
    cache_control: BetaCacheControlEphemeralParam | None
    content: str | Iterable[object]
    is_error: bool
    toolset_name: str | None


class InputSchemaTyped(TypedDict, total=False):
    type: Required[Literal["object"]]
    properties: dict[str, object] | None
    required: Sequence[str] | None


class BetaToolParam(TypedDict, total=False):
    input_schema: Required[InputSchemaTyped | dict[str, object]]
    name: Required[str]
    allowed_callers: list[
        Literal[
            "direct",
            "code_execution_20250825",
            "code_execution_20260120",
            "code_execution_20260521",
        ]
    ]
    cache_control: BetaCacheControlEphemeralParam | None
    defer_loading: bool
    description: str
    eager_input_streaming: bool | None
    input_examples: Iterable[object]
    strict: bool
    type: Literal["custom"] | None


class BetaSystemMessageOutputConfigParam(TypedDict, total=False):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None
