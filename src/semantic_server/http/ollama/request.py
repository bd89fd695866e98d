"""Translates the requests of POST /api/chat and /api/generate to the domain's types.

The id of a tool call is its place in the conversation, because clients do not send ids back.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from semantic.application.chat.call_grammar import answer_grammar
from semantic.domain.chat import Chat, Message, Tool, ToolCall, numbered_call
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask, Prompt, ServedModel
from semantic_server.http.errors import FieldError
from semantic_server.http.ollama.options import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    MESSAGE_FIELDS,
    OTHER_WIRES,
    read_format,
    read_keep_alive,
    read_logprobs,
    read_options,
    read_think,
)
from semantic_server.http.openai.conversation import tools_of
from semantic_server.http.openai.fields import warnings
from semantic_server.http.openai.requests import Caller, check_model
from semantic_server.http.request_fields.notes import picture
from semantic_server.http.request_fields.table import (
    Field,
    fields_of,
    flag_at,
    list_at,
    object_at,
    text_at,
)

_ROLES: Final = ("system", "user", "assistant", "tool")


class _OpenCalls:
    def __init__(self) -> None:
        self._open: dict[str, ToolCall] = {}  # by the server's id of the call
        self._ids: dict[str, str] = {}  # the server's ids of the calls, by the client's id
        self._named: dict[str, deque[str]] = {}

    def add(self, call: ToolCall, given_id: object) -> None:
        self._open[call.id] = call
        self._named.setdefault(call.name, deque()).append(call.id)
        if isinstance(given_id, str):
            self._ids[given_id] = call.id

    def take(self, given_id: object, name: str | None) -> ToolCall | None:
        """Return the call with the id `given_id`, or else the next call of the tool `name`."""
        if isinstance(given_id, str):
            found = self._open.pop(self._ids.get(given_id, given_id), None)
            if found is not None:
                return found
        if name is None:
            return self._open.pop(next(iter(self._open)), None) if self._open else None
        named = self._named.get(name, deque())
        while named:
            found = self._open.pop(named.popleft(), None)
            if found is not None:
                return found
        return None


class ConversationReader:
    """Reads the messages of one request."""

    def __init__(self) -> None:
        self._calls = 0
        self._open = _OpenCalls()

    def read(self, value: object) -> tuple[Message, ...]:
        """Read `messages`. Raises FieldError for the first invalid message."""
        found = list_at("messages", [] if value is None else value)
        return tuple(self._message(f"messages[{i}]", one) for i, one in enumerate(found))

    def _message(self, path: str, value: object) -> Message:
        given = object_at(path, value)
        # Skip other fields, which have no effect: there may be many messages.
        known = {name: value for name, value in given.items() if name in MESSAGE_FIELDS}
        message = fields_of(known, MESSAGE_FIELDS, {}, warnings, f"{path}.")
        content = text_at(f"{path}.content", message.get("content", ""))
        match message.get("role"):
            case "system" | "user" as role:
                return _with_images(Message(_plain(role), content), path, message)
            case "assistant":
                thinking = text_at(f"{path}.thinking", message.get("thinking", ""))
                calls = self._read_calls(f"{path}.tool_calls", message.get("tool_calls", []))
                return Message("assistant", content, thinking, calls)
            case "tool":
                return _with_images(self._result(path, message, content), path, message)
            case _:
                at = f"{path}.role"
                raise FieldError(f"{at}: expected one of {', '.join(_ROLES)}", param=at)

    def _read_calls(self, path: str, value: object) -> tuple[ToolCall, ...]:
        self._open = _OpenCalls()
        return tuple(self._call(f"{path}[{i}]", one) for i, one in enumerate(list_at(path, value)))

    def _call(self, path: str, value: object) -> ToolCall:
        given = object_at(path, value)
        at = f"{path}.function"
        function = object_at(at, given.get("function"))
        arguments = function.get("arguments", {})
        if not isinstance(arguments, dict):
            at = f"{at}.arguments"
            raise FieldError(f"{at}: expected an object", param=at)
        call = ToolCall(
            numbered_call(self._calls),
            text_at(f"{at}.name", function.get("name")),
            json.dumps(arguments, ensure_ascii=False),
        )
        self._calls += 1
        self._open.add(call, given.get("id"))
        return call

    def _result(self, path: str, message: Mapping[str, object], content: str) -> Message:
        name = message.get("tool_name")
        tool = None if name is None else text_at(f"{path}.tool_name", name)
        call = self._open.take(message.get("tool_call_id"), tool)
        if call is None:
            return Message("tool", content, name=tool)
        return Message("tool", content, tool_call_id=call.id, name=tool or call.name)


def _with_images(message: Message, path: str, given: Mapping[str, object]) -> Message:
    images = list_at(f"{path}.images", given.get("images", []))
    notes = [picture(text_at(f"{path}.images[{i}]", one)) for i, one in enumerate(images)]
    return replace(
        message,
        content="\n".join(filter(None, (message.content, *(text for text, _ in notes)))),
        attachments=tuple(one for _, one in notes),
    )


def _plain(role: str) -> Literal["system", "user"]:
    return "system" if role == "system" else "user"


def read_tools(value: object) -> tuple[Tool, ...]:
    """Return the functions in the field `tools`. Raises FieldError for an invalid tool."""
    given = list_at("tools", [] if value is None else value)
    return tools_of([_function(one) if isinstance(one, dict) else one for one in given])


def _function(tool: Mapping[str, object]) -> dict[str, object]:
    given = {name: value for name, value in tool.items() if value is not None}
    return {"type": "function", **given}


# A conversation as numbers

_MARK: Final = b"semantic-1\n"
"""The beginning of each `context`. It distinguishes this server's contexts from another one's."""
_BYTE: Final = 256


def as_context(messages: tuple[Message, ...]) -> list[int]:
    """Return a conversation as the field `context`, with one number per byte of its text. Token ids
    would change when more messages follow."""
    turns = [[one.role, one.content, one.reasoning] for one in messages]
    text = json.dumps(turns, ensure_ascii=False, separators=(",", ":"))
    return list(_MARK + text.encode("utf-8", "surrogatepass"))


def read_context(value: object) -> tuple[Message, ...]:
    """Return the conversation in `context`. Raises FieldError for another server's `context`."""
    if value in (None, []):
        return ()
    numbers = list_at("context", value)
    if not all(type(one) is int and 0 <= one < _BYTE for one in numbers):
        raise _foreign_context()
    data = bytes(one for one in numbers if isinstance(one, int))
    if not data.startswith(_MARK):
        raise _foreign_context()
    try:
        turns = json.loads(data.removeprefix(_MARK).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise _foreign_context() from error
    if not isinstance(turns, list):
        raise _foreign_context()
    return tuple(_turn(one) for one in turns)


def _turn(value: object) -> Message:
    match value:
        case ["system" | "user" as role, str(content), ""]:
            return Message(_plain(role), content)
        case ["assistant", str(content), str(reasoning)]:
            return Message("assistant", content, reasoning)
        case _:
            raise _foreign_context()


def _foreign_context() -> FieldError:
    return FieldError(
        "context must be the unchanged context of a reply of this server", param="context"
    )


LATEST: Final = ":latest"
"""The default tag of a model name, as in Ollama."""


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A parsed request. If `ask` is None, the request only loads the model. The model stays loaded
    for `keep_alive` seconds, or by the server's setting if it is None."""

    model: str
    ask: Ask | None
    stream: bool
    keep_alive: float | None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation to answer, or () for a plain prompt."""
        prompt = None if self.ask is None else self.ask.prompt
        return prompt.messages if isinstance(prompt, Chat) else ()


def chat_request(body: Mapping[str, object], model: ServedModel, caller: Caller) -> OllamaRequest:
    """Parse the body of POST /api/chat. Raises InvalidRequestError and ModelNotFoundError."""
    known = _known(body, CHAT_FIELDS, model)
    messages = ConversationReader().read(known.get("messages"))
    tools = read_tools(known.get("tools"))
    chat = Chat(messages, tools) if messages else None
    return _request(known, chat, model, caller)


def generate_request(
    body: Mapping[str, object], model: ServedModel, caller: Caller
) -> OllamaRequest:
    """Parse the body of POST /api/generate. Raises InvalidRequestError and ModelNotFoundError."""
    known = _known(body, GENERATE_FIELDS, model)
    text = text_at("prompt", known.get("prompt", ""))
    system = text_at("system", known.get("system", ""))
    before = read_context(known.get("context"))
    prompt: Prompt | None = None
    if flag_at("raw", known.get("raw", False)):
        for name, value in (("system", system), ("context", before)):
            if value:
                raise FieldError(f"{name}: not allowed with a raw prompt", param=name)
        prompt = text or None
    elif text:
        prompt = Chat((*before, *_new_system(system, before), Message("user", text)))
    return _request(known, prompt, model, caller)


def _new_system(system: str, before: Sequence[Message]) -> tuple[Message, ...]:
    last = next((one for one in reversed(before) if one.role == "system"), None)
    is_said = last is not None and last.content == system
    return () if is_said or not system else (Message("system", system),)


def _request(
    known: Mapping[str, object], prompt: Prompt | None, model: ServedModel, caller: Caller
) -> OllamaRequest:
    options = read_options(known.get("options"), model)
    think, thinking_tokens = read_think(known.get("think"))
    sampling = replace(options.sampling, logprobs=read_logprobs(known))
    prompt, sampling = _in_form(prompt, sampling, known, think)
    ask = None
    if prompt is not None:
        ask = Ask(
            prompt,
            sampling,
            options.max_tokens,
            caller.agent,
            caller.tenant,
            caller.identity,
            thinking_tokens,
            caller.keep,
            options.context_tokens,
            numbered_calls=True,
            hints=caller.hints,
        )
    return OllamaRequest(
        text_at("model", known["model"]),
        ask,
        flag_at("stream", known.get("stream", True)),
        read_keep_alive(known.get("keep_alive")),
    )


def _in_form(
    prompt: Prompt | None,
    sampling: SamplingParams,
    known: Mapping[str, object],
    think: Mapping[str, object],
) -> tuple[Prompt | None, SamplingParams]:
    form = read_format(known.get("format"))
    if isinstance(prompt, Chat):
        return replace(prompt, answer_format=form, template_options=think), sampling
    if form is None:
        return prompt, sampling
    return prompt, replace(sampling, grammar=answer_grammar(form))


def _known(
    body: Mapping[str, object], table: Mapping[str, Field], model: ServedModel
) -> dict[str, object]:
    known = fields_of(body, table, OTHER_WIRES, warnings)
    check_model(untagged(known.get("model")), model)
    return known


def untagged(name: object) -> str:
    """Return a model's name without the tag `LATEST`. Raises FieldError for an invalid name."""
    if not isinstance(name, str) or not name:
        raise FieldError("model must be a model's name", param="model")
    return name.removesuffix(LATEST)
