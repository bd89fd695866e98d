"""Validators of Anthropic's own request types."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import Annotated, TypeVar, cast

from annotated_types import Ge, Le
from pydantic import ConfigDict, TypeAdapter, with_config

from semantic_server.http.anthropic.request_types import (
    BetaRedactedThinkingBlockParam,
    BetaSystemMessageOutputConfigParam,
    BetaTextBlockParam,
    BetaThinkingBlockParam,
    BetaThinkingConfigAdaptiveParam,
    BetaThinkingConfigBetweenToolsParam,
    BetaThinkingConfigDisabledParam,
    BetaThinkingConfigEnabledParam,
    BetaToolChoiceAnyParam,
    BetaToolChoiceAutoParam,
    BetaToolChoiceNoneParam,
    BetaToolChoiceToolParam,
    BetaToolParam,
    BetaToolResultBlockParam,
    BetaToolUseBlockParam,
    MessageCountTokensParams,
    MessageCreateParams,
)
from semantic_server.http.request_fields.table import mapping_at, validated_at

ThinkingConfig = (
    BetaThinkingConfigEnabledParam
    | BetaThinkingConfigDisabledParam
    | BetaThinkingConfigBetweenToolsParam
    | BetaThinkingConfigAdaptiveParam
)
ToolChoiceParam = (
    BetaToolChoiceAutoParam
    | BetaToolChoiceAnyParam
    | BetaToolChoiceToolParam
    | BetaToolChoiceNoneParam
)

T = TypeVar("T")


class MessageBody(MessageCreateParams, total=False):
    """All fields of a message request, including fields that the SDK's newest type lacks."""

    stream: bool
    temperature: Annotated[float, Ge(0), Le(1)]
    top_p: Annotated[float, Ge(0), Le(1)]
    top_k: Annotated[int, Ge(0)]


@dataclass(frozen=True, slots=True)
class Validators:
    """Validators of Anthropic's types. A validator of a body skips the elements of its lists."""

    create: TypeAdapter[MessageBody]
    count: TypeAdapter[MessageCountTokensParams]
    text: TypeAdapter[BetaTextBlockParam]
    thinking: TypeAdapter[BetaThinkingBlockParam]
    redacted_thinking: TypeAdapter[BetaRedactedThinkingBlockParam]
    tool_use: TypeAdapter[BetaToolUseBlockParam]
    tool_result: TypeAdapter[BetaToolResultBlockParam]
    tool: TypeAdapter[BetaToolParam]
    turn_output: TypeAdapter[BetaSystemMessageOutputConfigParam]


@cache
def validators() -> Validators:
    """Return all validators. The first call takes a few milliseconds to build them."""
    return Validators(
        create=_strict(MessageBody),
        count=_strict(MessageCountTokensParams),
        text=_strict(BetaTextBlockParam),
        thinking=_strict(BetaThinkingBlockParam),
        redacted_thinking=_strict(BetaRedactedThinkingBlockParam),
        tool_use=_strict(BetaToolUseBlockParam),
        tool_result=_strict(BetaToolResultBlockParam),
        tool=_strict(BetaToolParam),
        turn_output=_strict(BetaSystemMessageOutputConfigParam),
    )


def _strict(kind: type[T]) -> TypeAdapter[T]:
    """Return a validator that converts no values. Text in place of a number is an error."""
    own = with_config(ConfigDict(strict=True))(new_class(kind.__name__, (kind,)))
    return TypeAdapter(cast("type[T]", own))


def checked(adapter: TypeAdapter[T], value: object, path: str) -> T:
    """Validate `value` with `adapter`. `path` is its place in the body. Raises FieldError."""
    return validated_at(path, adapter, mapping_at(path, value))
