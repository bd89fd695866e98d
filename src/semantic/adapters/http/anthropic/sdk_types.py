"""The request types of Anthropic's SDK, imported and compiled to validators on first use.

Importing the SDK takes seconds: call `load` off the event loop. Knows types only; not what a field
means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import new_class
from typing import TYPE_CHECKING, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, with_config

from semantic.adapters.http.errors import FieldError
from semantic.adapters.http.request_body import validated

if TYPE_CHECKING:
    from anthropic.types.beta import (
        BetaRedactedThinkingBlockParam,
        BetaSystemMessageOutputConfigParam,
        BetaTextBlockParam,
        BetaThinkingBlockParam,
        BetaToolParam,
        BetaToolResultBlockParam,
        BetaToolUseBlockParam,
    )
    from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SdkTypes:
    """One validator per type. Those of whole bodies do not validate list elements: elements are
    checked one by one, so that an error names the element."""

    create: TypeAdapter[MessageCreateParamsBase]
    count: TypeAdapter[MessageCountTokensParams]
    text: TypeAdapter[BetaTextBlockParam]
    thinking: TypeAdapter[BetaThinkingBlockParam]
    redacted_thinking: TypeAdapter[BetaRedactedThinkingBlockParam]
    tool_use: TypeAdapter[BetaToolUseBlockParam]
    tool_result: TypeAdapter[BetaToolResultBlockParam]
    tool: TypeAdapter[BetaToolParam]
    turn_output: TypeAdapter[BetaSystemMessageOutputConfigParam]


@cache
def load() -> SdkTypes:
    """Import the SDK's types and build their validators: takes seconds the first time, cached
    after."""
    from anthropic.types import beta
    from anthropic.types.beta.beta_system_message_output_config_param import (
        BetaSystemMessageOutputConfigParam,
    )
    from anthropic.types.beta.message_count_tokens_params import MessageCountTokensParams
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase

    return SdkTypes(
        create=_strict(MessageCreateParamsBase),
        count=_strict(MessageCountTokensParams),
        text=_strict(beta.BetaTextBlockParam),
        thinking=_strict(beta.BetaThinkingBlockParam),
        redacted_thinking=_strict(beta.BetaRedactedThinkingBlockParam),
        tool_use=_strict(beta.BetaToolUseBlockParam),
        tool_result=_strict(beta.BetaToolResultBlockParam),
        tool=_strict(beta.BetaToolParam),
        turn_output=_strict(BetaSystemMessageOutputConfigParam),
    )


def _strict(kind: type[T]) -> TypeAdapter[T]:
    """A validator that converts nothing, at any depth: a text is not a number."""
    own = with_config(ConfigDict(strict=True))(new_class(kind.__name__, (kind,)))
    return TypeAdapter(cast("type[T]", own))


def checked(adapter: TypeAdapter[T], value: object, path: str) -> T:
    """Validate `value` at `path` of a body with `adapter`. Raises FieldError."""
    found = object_at(value, path)
    try:
        return validated(adapter, found)
    except FieldError as error:
        inner = f".{error}" if error.param else f": {error}"
        param = f"{path}.{error.param}" if error.param else path
        raise FieldError(f"{path}{inner}", param=param) from error


def object_at(value: object, path: str) -> Mapping[str, object]:
    """`value` if it is an object. Raises FieldError naming `path`."""
    if not isinstance(value, dict):
        raise FieldError(f"{path}: expected an object", param=path)
    return value


def list_at(value: object, path: str) -> list[object]:
    """`value` if it is a list. Raises FieldError naming `path`."""
    if not isinstance(value, list):
        raise FieldError(f"{path}: expected a list", param=path)
    return value
