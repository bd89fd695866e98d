"""The arguments of the library's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, TypedDict

from semantic.application.chat.transcript import message_of
from semantic.domain.chat import AnswerFormat, Chat, Message, Tool, ToolChoice
from semantic.domain.errors import InvalidRequestError
from semantic.domain.identity import Hints
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask

Messages: TypeAlias = str | Sequence[Message | Mapping[str, object]]
"""The user's next message as text, or a whole conversation as a list of messages. A message may be
a mapping with `role` and `content`."""


class ChatOptions(TypedDict, total=False):
    """Options of an answer. The model supplies the defaults.

    A `temperature` of 0 is greedy. `stop` are texts that end the answer. `sampling` has all
    sampling parameters at once. `max_tokens` limits the answer; by default it may fill the context.
    `schema` is a JSON schema for the answer. `thinking_tokens` limits reasoning; 0 allows none.
    Without `keep`, the agent does not change. `template_options` go to the chat template. `done`,
    `back_in` (seconds), `priority` and `drafts` are hints, see `Hints`.
    """

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: Sequence[str]
    sampling: SamplingParams
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    schema: Mapping[str, object]
    thinking_tokens: int
    keep: bool
    template_options: Mapping[str, object]
    done: bool
    back_in: float
    priority: int
    drafts: bool


_KNOWN: Final = tuple(ChatOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a batch, with the options of its answer."""

    agent: str
    messages: Messages
    options: ChatOptions = field(default_factory=ChatOptions)
    model: str | None = None


def conversation(messages: Messages) -> tuple[Message, ...]:
    """Return messages in the domain's form. Raises InvalidRequestError for an empty list or a
    malformed message."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(f"expected a string or a list of messages, got {messages!r:.80}")
    return tuple(message_of(one) for one in messages)


def check_options(options: ChatOptions) -> None:
    """Raise InvalidRequestError for unknown, duplicate or invalid options."""
    unknown = sorted(options.keys() - set(_KNOWN))
    if unknown:
        raise InvalidRequestError(
            f"unknown option {unknown[0]!r:.80}; expected one of {', '.join(_KNOWN)}"
        )
    single = sorted(_SAMPLING & options.keys())
    if "sampling" in options and single:
        raise InvalidRequestError(f"expected either sampling or {single[0]}")
    if not all(isinstance(one, Tool) for one in options.get("tools", ())):
        raise InvalidRequestError("tools must be a list of semantic.Tool")
    stop = options.get("stop", ())
    if isinstance(stop, str) or not all(isinstance(one, str) for one in stop):
        raise InvalidRequestError(f"stop must be a list of strings, got {stop!r:.80}")
    _hints(options)


def ask_for(
    agent: str, messages: Sequence[Message], options: ChatOptions, sampling: SamplingParams
) -> Ask:
    """Return the request for an answer to `messages`. `sampling` has the defaults of the model.
    Raises InvalidRequestError for an option out of range."""
    schema = options.get("schema")
    chat = Chat(
        tuple(messages),
        tuple(options.get("tools", ())),
        options.get("tool_choice", ToolChoice()),
        options.get("parallel_tool_calls", True),
        answer_format=None if schema is None else AnswerFormat(schema),
        template_options=options.get("template_options", {}),
    )
    return Ask(
        chat,
        _sampling(options, sampling),
        options.get("max_tokens"),
        agent=agent,
        thinking_tokens=options.get("thinking_tokens"),
        keep=options.get("keep", True),
        hints=_hints(options),
    )


_SAMPLING: Final = frozenset({"temperature", "top_p", "top_k", "min_p", "seed", "stop"})


def _hints(options: ChatOptions) -> Hints:
    done, back_in, priority = (options.get(name) for name in ("done", "back_in", "priority"))
    if not isinstance(done, bool | None):
        raise InvalidRequestError(f"done must be True or False, got {done!r:.80}")
    if not isinstance(back_in, int | float | None) or isinstance(back_in, bool):
        raise InvalidRequestError(f"back_in must be a number of seconds, got {back_in!r:.80}")
    if not isinstance(priority, int | None) or isinstance(priority, bool):
        raise InvalidRequestError(f"priority must be an integer, got {priority!r:.80}")
    drafts = options.get("drafts", True)
    if not isinstance(drafts, bool):
        raise InvalidRequestError(f"drafts must be True or False, got {drafts!r:.80}")
    return Hints(done or False, back_in, priority or 0, drafts)


def _sampling(options: ChatOptions, of_model: SamplingParams) -> SamplingParams:
    base = options.get("sampling", of_model)
    return replace(
        base,
        temperature=options.get("temperature", base.temperature),
        top_p=options.get("top_p", base.top_p),
        top_k=options.get("top_k", base.top_k),
        min_p=options.get("min_p", base.min_p),
        seed=options.get("seed", base.seed),
        stop=tuple(options.get("stop", base.stop)),
    )
