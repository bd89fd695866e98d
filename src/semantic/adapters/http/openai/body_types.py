"""The bodies of all three routes: OpenAI's own types, and what clients of local servers add.

Importing this imports OpenAI's SDK, which takes its time: only requests do it. Values are checked
strictly, a text is no number. What these types leave lazy, or allow in several shapes, is checked
by who reads it: see `plain_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatBase
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseBase
from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

_STRICT = ConfigDict(strict=True)

_READ_BY_PART: Final = frozenset(
    {"messages", "prompt", "response_format", "stop", "tool_choice", "tools"}
)

_REQUIRED: Final[dict[str, object]] = {"messages": [], "prompt": ""}
"""In place of the fields that must be there."""


class Extensions(TypedDict, total=False):
    """What all bodies may have beside OpenAI's fields."""

    stream: bool
    agent_id: str
    ignore_eos: bool
    min_p: float
    min_tokens: int
    repetition_penalty: float
    top_k: int


@with_config(_STRICT)
class ChatBody(ChatBase, Extensions, total=False):
    """The body of a request for a chat completion."""

    chat_template_kwargs: dict[str, object]


@with_config(_STRICT)
class CompletionBody(CompletionBase, Extensions, total=False):
    """The body of a request for a completion."""


@with_config(_STRICT)
class ResponseBody(ResponseBase, Extensions, total=False):
    """The body of a request for a response."""

    frequency_penalty: float
    logit_bias: dict[str, int]
    presence_penalty: float
    seed: int


def plain_fields(known: Mapping[str, object]) -> dict[str, object]:
    """`known` without what is read part by part, so that each error names the very part."""
    plain = {name: value for name, value in known.items() if name not in _READ_BY_PART}
    return plain | {name: value for name, value in _REQUIRED.items() if name in known}


@lru_cache(maxsize=1)
def chat_adapter() -> TypeAdapter[ChatBody]:
    """Validates bodies of chat completions."""
    return TypeAdapter(ChatBody)


@lru_cache(maxsize=1)
def completion_adapter() -> TypeAdapter[CompletionBody]:
    """Validates bodies of completions."""
    return TypeAdapter(CompletionBody)


@lru_cache(maxsize=1)
def response_adapter() -> TypeAdapter[ResponseBody]:
    """Validates bodies of responses."""
    return TypeAdapter(ResponseBody)
