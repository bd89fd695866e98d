"""Simulated coding agents on three wires: each sends its whole history with every request.

Requests have the shapes of recorded ones, not their texts. What real agents vary without meaning
(headers, key order, ids) varies here too, from request to request.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from tests.support.http_server import Reply, RunningServer

Json = dict[str, object]

MAX_TOKENS = 16
MAX_CALL_TOKENS = 80

_ADAPTIVE: Json = {"type": "adaptive", "display": "omitted"}


def words(n: int, seed: str) -> str:
    """A text of `n` words."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghijklmno", k=3)) for _ in range(n))


def schema(name: str) -> Json:
    """The parameters of a tool, as a schema that can be enforced."""
    return {
        "type": "object",
        "properties": {"which": {"enum": ["a", "b"], "description": words(6, name)}},
        "required": ["which"],
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class TurnResult:
    """The result of one turn."""

    text: str
    calls: tuple[str, ...]
    """The ids of the calls of tools."""
    prompt: int
    cached: int
    lost: Json | None

    @property
    def share(self) -> float:
        return self.cached / self.prompt


@dataclass
class AgentClient:
    """A conversation of one agent; `items` are its messages.

    Subclasses render `items` in the shape of their wire, for each request.
    """

    server: RunningServer
    session: str
    agent: str | None = None
    key: str | None = None
    system: str = ""
    tools: list[tuple[str, str]] = field(
        default_factory=lambda: [(name, f"{name}s it.") for name in ("Read", "Bash", "Web")]
    )
    items: list[Json] = field(default_factory=list)
    thinks: bool = True
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    path = ""

    def __post_init__(self) -> None:
        self.system = self.system or words(250, self.session)

    # History

    def user(self, text: str) -> None:
        raise NotImplementedError

    def note(self, text: str) -> None:
        """A system message in the middle."""
        raise NotImplementedError

    def result(self, call: str, text: str) -> None:
        """The result of a call."""
        raise NotImplementedError

    def receive(self, reply: Json) -> TurnResult:
        """Append an answer to the history."""
        raise NotImplementedError

    # Request shapes

    def headers(self) -> dict[str, str]:
        raise NotImplementedError

    def body(self, *, call: bool = False) -> Json:
        """A request for an answer; with `call` for a tool call."""
        raise NotImplementedError

    def title_body(self, text: str) -> Json:
        """A request for a title: another system message, no tools."""
        raise NotImplementedError

    # Requests

    def ask(self, text: str | None = None, *, call: bool = False) -> TurnResult:
        """Send `text`, if any, and append the answer."""
        if text is not None:
            self.user(text)
        return self.receive(self.send(self.body(call=call)).json)

    def title(self, text: str) -> None:
        """Request a title, under the same session."""
        self.send(self.title_body(text))

    def use_tool(self, number: int) -> TurnResult:
        """Let the model call a tool, and append the result."""
        turn = self.ask(call=True)
        for call in turn.calls:
            self.result(call, words(8, f"result {number}"))
        return turn

    def send(self, body: Json) -> Reply:
        reply = self.server.ask("POST", self.path, body, self.noisy_headers())
        assert reply.status == 200, reply.body
        return reply

    def noisy_headers(self) -> dict[str, str]:
        number = next(self._numbers)
        noise = {
            "user-agent": f"{self.session}/1.{number}",
            "x-request-id": f"r-{number}",
            "content-type": "application/json",
        }
        key = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return {**noise, **self.headers(), **key}

    def fork(self, **changes: object) -> AgentClient:
        """Another agent with the same history."""
        other = copy.copy(self)
        other.items = copy.deepcopy(self.items)
        other._numbers = itertools.count()
        for name, value in changes.items():
            setattr(other, name, value)
        return other

    def turned(self, value: object) -> object:
        """`value` with the keys of all its objects in another order each time."""
        number = next(self._numbers)
        return _turned(value, number) if number % 2 else value


def _turned(value: object, number: int) -> object:
    if isinstance(value, dict):
        keys = list(value)
        random.Random(number).shuffle(keys)
        return {key: _turned(value[key], number) for key in keys}
    if isinstance(value, list):
        return [_turned(one, number) for one in value]
    return value


class ChatAgent(AgentClient):
    """In the shape of opencode: chat completions, a title first."""

    path = "/v1/chat/completions"

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def note(self, text: str) -> None:
        self.items.append({"role": "system", "content": text})

    def result(self, call: str, text: str) -> None:
        self.items.append({"role": "tool", "tool_call_id": call, "content": text})

    def headers(self) -> dict[str, str]:
        own = self.session if self.agent is None else f"{self.session}-{self.agent}"
        found = {"x-session-id": own, "x-session-affinity": own}
        return found if self.agent is None else {**found, "x-parent-session-id": self.session}

    def body(self, *, call: bool = False) -> Json:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": text,
                    "parameters": schema(name),
                    "strict": True,
                },
            }
            for name, text in self.tools
        ]
        as_parts = next(self._numbers) % 3 == 0
        said = [self._written(item, as_parts=as_parts) for item in self.items]
        return {
            "model": "default",
            "messages": [{"role": "system", "content": self.system}, *said],
            "tools": self.turned(tools),
            "tool_choice": "required" if call else "none",
            "parallel_tool_calls": False,
            "max_tokens": MAX_CALL_TOKENS if call else MAX_TOKENS,
            "temperature": 0,
            **({} if self.thinks else {"chat_template_kwargs": {"enable_thinking": False}}),
        }

    def title_body(self, text: str) -> Json:
        system = {"role": "system", "content": words(60, "title")}
        messages = [system, {"role": "user", "content": text}]
        return {"model": "default", "messages": messages, "max_tokens": 4, "temperature": 0}

    def receive(self, reply: Json) -> TurnResult:
        [choice] = cast("list[Json]", reply["choices"])
        message, usage = cast("Json", choice["message"]), cast("Json", reply["usage"])
        calls = cast("list[Json]", message.get("tool_calls") or [])
        said: Json = {"role": "assistant", "content": message["content"]}
        self.items.append(said | ({"tool_calls": calls} if calls else {}))
        details = cast("dict[str, int]", usage["prompt_tokens_details"])
        return TurnResult(
            str(message["content"] or ""),
            tuple(str(one["id"]) for one in calls),
            cast("int", usage["prompt_tokens"]),
            details["cached_tokens"],
            _lost(usage),
        )

    @staticmethod
    def _written(item: Json, *, as_parts: bool) -> Json:
        content = item.get("content")
        if not (as_parts and isinstance(content, str) and content):
            return item
        return {**item, "content": [{"type": "text", "text": content}]}


class MessagesAgent(AgentClient):
    """In the shape of Claude Code: messages, hidden thoughts, a system message after the first."""

    path = "/v1/messages"

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def note(self, text: str) -> None:
        self.items.append({"role": "system", "content": text})

    def result(self, call: str, text: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call, "content": text}
        self.items.append({"role": "user", "content": [block]})

    def headers(self) -> dict[str, str]:
        found = {"x-claude-code-session-id": self.session, "anthropic-version": "2023-06-01"}
        return found if self.agent is None else {**found, "x-claude-code-agent-id": self.agent}

    def body(self, *, call: bool = False) -> Json:
        tools = [
            {"name": name, "description": text, "input_schema": schema(name), "strict": True}
            for name, text in self.tools
        ]
        number = next(self._numbers)
        billing = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"
        mark = {"cache_control": {"type": "ephemeral"}}
        choice = {"type": "any", "disable_parallel_tool_use": True} if call else {"type": "none"}
        return {
            "model": "default",
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": self.system, **mark},
            ],
            "messages": self._messages(),
            "tools": self.turned(tools),
            "tool_choice": choice,
            "metadata": {
                "user_id": f'{{"session_id": "{self.session}", "device_id": "d{number}"}}'
            },
            "max_tokens": MAX_CALL_TOKENS if call else MAX_TOKENS,
            "thinking": _ADAPTIVE if self.thinks else {"type": "disabled"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "temperature": 0,
        }

    def title_body(self, text: str) -> Json:
        messages = [{"role": "user", "content": text}]
        system = words(60, "title")
        return {"model": "default", "system": system, "messages": messages, "max_tokens": 4}

    def receive(self, reply: Json) -> TurnResult:
        blocks, usage = cast("list[Json]", reply["content"]), cast("Json", reply["usage"])
        if blocks:
            self.items.append({"role": "assistant", "content": blocks})
        read = cast("int", usage["cache_read_input_tokens"])
        rest = cast("int", usage["input_tokens"]) + cast(
            "int", usage["cache_creation_input_tokens"]
        )
        return TurnResult(
            "".join(str(one["text"]) for one in blocks if one["type"] == "text"),
            tuple(str(one["id"]) for one in blocks if one["type"] == "tool_use"),
            read + rest,
            read,
            _lost(usage),
        )

    def _messages(self) -> list[Json]:
        first, *later = [*map(self._plain, self.items[:-1]), self._marked(self.items[-1])]
        return [first, {"role": "system", "content": words(20, "skills")}, *later]

    @staticmethod
    def _plain(item: Json) -> Json:
        """An earlier message: a single text block becomes plain text."""
        match item["content"]:
            case [{"type": "text", "text": text}]:
                return {**item, "content": text}
        return item

    @staticmethod
    def _marked(item: Json) -> Json:
        """The last message: blocks, of which the last has the mark."""
        content = item["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        *first, last = cast("list[Json]", blocks)
        return {**item, "content": [*first, {**last, "cache_control": {"type": "ephemeral"}}]}


class ResponsesAgent(AgentClient):
    """In the shape of Codex: responses that are not stored, encrypted reasoning sent back."""

    path = "/v1/responses"

    def user(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        self.items.append({"type": "message", "role": "user", "content": [part]})

    def note(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        self.items.append({"type": "message", "role": "developer", "content": [part]})

    def result(self, call: str, text: str) -> None:
        self.items.append({"type": "function_call_output", "call_id": call, "output": text})

    def headers(self) -> dict[str, str]:
        thread = self.session if self.agent is None else f"{self.session}-{self.agent}"
        found = {"originator": "codex_cli_rs", "session-id": self.session, "thread-id": thread}
        return {**found, "x-client-request-id": thread}

    def body(self, *, call: bool = False) -> Json:
        tools: list[Json] = [
            {
                "type": "function",
                "name": name,
                "description": text,
                "parameters": schema(name),
                "strict": True,
            }
            for name, text in self.tools
        ]
        tools.append({"type": "web_search"})
        own = {"type": "input_text", "text": self.system}
        rules = {"type": "input_text", "text": words(30, "rules")}
        first = [{"type": "message", "role": "developer", "content": [own]}]
        first += [{"type": "message", "role": "developer", "content": [rules]}]
        return {
            "model": "default",
            "input": [*first, *self.items],
            "tools": self.turned(tools),
            "tool_choice": "required" if call else "none",
            "parallel_tool_calls": False,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": self.session,
            "client_metadata": {"turn": str(next(self._numbers))},
            "max_output_tokens": MAX_CALL_TOKENS if call else MAX_TOKENS,
            "temperature": 0,
            **({} if self.thinks else {"chat_template_kwargs": {"enable_thinking": False}}),
        }

    def title_body(self, text: str) -> Json:
        asked = {"model": "default", "instructions": words(60, "title"), "input": text}
        return {**asked, "store": False, "max_output_tokens": 16, "temperature": 0}

    def receive(self, reply: Json) -> TurnResult:
        output, usage = cast("list[Json]", reply["output"]), cast("Json", reply["usage"])
        for item in output:
            sent_back = {name: value for name, value in item.items() if name != "status"}
            if item["type"] == "reasoning":
                sent_back.pop("content")
            self.items.append(sent_back)
        details = cast("dict[str, int]", usage["input_tokens_details"])
        parts = [
            part
            for item in output
            if item["type"] == "message"
            for part in cast("list[Json]", item["content"])
        ]
        return TurnResult(
            "".join(str(part["text"]) for part in parts),
            tuple(str(one["call_id"]) for one in output if one["type"] == "function_call"),
            cast("int", usage["input_tokens"]),
            details["cached_tokens"],
            _lost(usage),
        )


def _lost(usage: Json) -> Json | None:
    return cast("Json", usage["semantic"])["lost"]  # type: ignore[return-value]  # as it came


WIRES: dict[str, type[AgentClient]] = {
    "messages": MessagesAgent,
    "responses": ResponsesAgent,
    "chat": ChatAgent,
}


def require_cached(turns: Sequence[TurnResult], least: float = 0.95) -> None:
    """From the second turn on, at least this share of the prompt is cached, with no cache miss."""
    for number, turn in enumerate(turns):
        assert turn.lost is None, (number, turn)
        assert number == 0 or turn.share >= least, (number, turn)
