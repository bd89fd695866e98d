"""A client's conversation on each of the four wires: what it sends, and what it reads of answers.

Each keeps its whole history and sends it with every request, as agents do.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, cast

from tests.support.http_server import Address

Json = dict[str, object]
PIXEL: Final = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""An image of one pixel."""


@dataclass(frozen=True)
class Made:
    """A call as a client reads it."""

    id: str
    name: str
    arguments: object


@dataclass
class Heard:
    """An answer as a client reads it. `cached` is None on a wire that does not say it."""

    text: str = ""
    reasoning: str = ""
    calls: list[Made] = field(default_factory=list)
    prompt: int = 0
    written: int = 0
    cached: int | None = None


class Wire(ABC):
    """One conversation."""

    path: ClassVar[str]

    def __init__(self, tools: Sequence[Json], *, streams: bool) -> None:
        """`tools` have a name, a description and parameters each."""
        self.tools = tools
        self.streams = streams
        self.items: list[Json] = []

    @abstractmethod
    def user(self, text: str) -> None: ...

    @abstractmethod
    def result(self, call: Made, text: str, *, image: bool = False) -> None: ...

    @abstractmethod
    def body(self) -> Json: ...

    @abstractmethod
    def whole(self, reply: Json) -> Heard: ...

    @abstractmethod
    def joined(self, events: Sequence[Json]) -> Json:
        """The whole reply that these events are the pieces of."""

    def interrupt(self, calls: Sequence[Made], text: str) -> None:
        """A user speaks before the calls' results are there."""
        del calls
        self.user(text)

    def ask(self, server: Address, more: Json | None = None) -> Heard:
        """Send the history, with `more` in the body, and append the answer."""
        body, headers = self.body() | (more or {}), {"content-type": "application/json"}
        reply = server.ask("POST", self.path, body, headers)
        assert reply.status == 200, reply.body
        if not self.streams:
            return self.whole(reply.json)
        return self.whole(self.joined(list(_events(reply.body.decode()))))


def _events(body: str) -> Iterator[Json]:
    """Of a stream of server-sent events, or of lines of JSON."""
    for line in body.splitlines():
        text = line.removeprefix("data: ")
        if text.startswith("{"):
            yield json.loads(text)


class Chat(Wire):
    path = "/v1/chat/completions"

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def result(self, call: Made, text: str, *, image: bool = False) -> None:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        content: object = [{"type": "text", "text": text}, url] if image else text
        self.items.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def body(self) -> Json:
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        asked: Json = {"model": "default", "messages": self.items, "tools": tools}
        if self.streams:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked

    def whole(self, reply: Json) -> Heard:
        [choice] = cast("list[dict[str, Json]]", reply["choices"])
        message, usage = choice["message"], cast("Json", reply["usage"])
        calls = cast("list[Json]", message.get("tool_calls") or [])
        said: Json = {"role": "assistant", "content": message["content"]}
        self.items.append(said | ({"tool_calls": calls} if calls else {}))
        made = [(str(one["id"]), cast("Json", one["function"])) for one in calls]
        details = cast("dict[str, int]", usage["prompt_tokens_details"])
        return Heard(
            str(message["content"] or ""),
            str(message.get("reasoning_content") or ""),
            [Made(n, str(f["name"]), json.loads(str(f["arguments"]))) for n, f in made],
            cast("int", usage["prompt_tokens"]),
            cast("int", usage["completion_tokens"]),
            details["cached_tokens"],
        )

    def joined(self, events: Sequence[Json]) -> Json:
        text, thought, usage = "", "", events[-1]["usage"]
        calls: dict[int, dict[str, Json]] = {}
        for event in events:
            for choice in cast("list[dict[str, Json]]", event["choices"]):
                delta = choice["delta"]
                text += str(delta.get("content") or "")
                thought += str(delta.get("reasoning_content") or "")
                for part in cast("list[Json]", delta.get("tool_calls") or []):
                    function = cast("Json", part["function"])
                    index = cast("int", part["index"])
                    if "id" in part:
                        calls[index] = cast("dict[str, Json]", {**part, "function": function})
                        calls[index].pop("index")
                        continue
                    known = calls[index]["function"]
                    known["arguments"] = f"{known['arguments']}{function['arguments']}"
        message = {"content": text or None, "reasoning_content": thought}
        choices = [{"message": {**message, "tool_calls": list(calls.values())}}]
        return {"choices": choices, "usage": usage}


class Messages(Wire):
    path = "/v1/messages"

    def user(self, text: str) -> None:
        self._add({"type": "text", "text": text})

    def result(self, call: Made, text: str, *, image: bool = False) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        shown = [{"type": "image", "source": source}] if image else []
        content = [{"type": "text", "text": text}, *shown]
        self._add({"type": "tool_result", "tool_use_id": call.id, "content": content})

    def interrupt(self, calls: Sequence[Made], text: str) -> None:
        for call in calls:
            self.result(call, "Interrupted by the user.")
        self.user(text)

    def _add(self, block: Json) -> None:
        last = self.items[-1] if self.items else {}
        if last.get("role") == "user":
            cast("list[Json]", last["content"]).append(block)
        else:
            self.items.append({"role": "user", "content": [block]})

    def body(self) -> Json:
        tools = [
            {"name": one["name"], "description": "", "input_schema": one["parameters"]}
            for one in self.tools
        ]
        asked: Json = {"model": "default", "messages": self.items, "tools": tools}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        return {**asked, "max_tokens": 2048, "thinking": thinking, "stream": self.streams}

    def whole(self, reply: Json) -> Heard:
        blocks, usage = cast("list[Json]", reply["content"]), cast("dict[str, int]", reply["usage"])
        if blocks:
            self.items.append({"role": "assistant", "content": blocks})
        read = usage["cache_read_input_tokens"]
        return Heard(
            "".join(str(one["text"]) for one in blocks if one["type"] == "text"),
            "".join(str(one["thinking"]) for one in blocks if one["type"] == "thinking"),
            [
                Made(str(one["id"]), str(one["name"]), one["input"])
                for one in blocks
                if one["type"] == "tool_use"
            ],
            usage["input_tokens"] + usage["cache_creation_input_tokens"] + read,
            usage["output_tokens"],
            read,
        )

    def joined(self, events: Sequence[Json]) -> Json:
        blocks: list[Json] = []
        usage: Json = {}
        for event in events:
            if event["type"] == "message_start":
                usage |= cast("dict[str, Json]", event["message"])["usage"]
            elif event["type"] == "message_delta":
                usage |= cast("Json", event["usage"])
            elif event["type"] == "content_block_start":
                blocks.append(dict(cast("Json", event["content_block"])))
            elif event["type"] == "content_block_delta":
                delta = cast("dict[str, str]", event["delta"])
                [(name, text)] = [(name, text) for name, text in delta.items() if name != "type"]
                known = blocks[-1].get(name) or ""
                blocks[-1][name] = f"{known}{text}"
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(str(block.pop("partial_json", "")) or "{}")
        return {"content": blocks, "usage": usage}


class Responses(Wire):
    path = "/v1/responses"

    def user(self, text: str) -> None:
        part = {"type": "input_text", "text": text}
        self.items.append({"type": "message", "role": "user", "content": [part]})

    def result(self, call: Made, text: str, *, image: bool = False) -> None:
        url = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}"}
        output: object = [{"type": "input_text", "text": text}, url] if image else text
        self.items.append({"type": "function_call_output", "call_id": call.id, "output": output})

    def body(self) -> Json:
        tools = [{"type": "function", **tool} for tool in self.tools]
        return {
            "model": "default",
            "input": self.items,
            "tools": tools,
            "store": False,
            "stream": self.streams,
        }

    def whole(self, reply: Json) -> Heard:
        output, usage = cast("list[Json]", reply["output"]), cast("dict[str, int]", reply["usage"])
        self.items += output
        texts = [
            str(part["text"])
            for item in output
            if item["type"] == "message"
            for part in cast("list[Json]", item["content"])
        ]
        thoughts = [
            str(part["text"])
            for item in output
            if item["type"] == "reasoning"
            for part in cast("list[Json]", item.get("content") or [])
        ]
        return Heard(
            "".join(texts),
            "".join(thoughts),
            [
                Made(str(one["call_id"]), str(one["name"]), json.loads(str(one["arguments"])))
                for one in output
                if one["type"] == "function_call"
            ],
            usage["input_tokens"],
            usage["output_tokens"],
            cast("dict[str, dict[str, int]]", usage)["input_tokens_details"]["cached_tokens"],
        )

    def joined(self, events: Sequence[Json]) -> Json:
        reply = cast("Json", events[-1]["response"])
        pieces: dict[object, str] = {}
        for event in events:
            kind = str(event["type"])
            if kind.endswith(("function_call_arguments.delta", "output_text.delta")):
                at = event["output_index"]
                pieces[at] = pieces.get(at, "") + str(event["delta"])
        for at, item in enumerate(cast("list[Json]", reply["output"])):
            if item["type"] == "function_call":
                assert pieces.get(at, "") == item["arguments"]
            elif item["type"] == "message":
                parts = cast("list[Json]", item["content"])
                assert pieces.get(at, "") == "".join(str(part["text"]) for part in parts)
        return reply


class Ollama(Wire):
    path = "/api/chat"

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def result(self, call: Made, text: str, *, image: bool = False) -> None:
        said: Json = {"role": "tool", "tool_name": call.name, "content": text}
        said |= {"tool_call_id": call.id} if call.id else {}
        self.items.append(said | ({"images": [PIXEL]} if image else {}))

    def body(self) -> Json:
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        asked = {"model": "default", "messages": self.items, "tools": tools}
        return {**asked, "stream": self.streams}

    def whole(self, reply: Json) -> Heard:
        message = cast("Json", reply["message"])
        self.items.append(message)
        calls = cast("list[dict[str, Json]]", message.get("tool_calls") or [])
        return Heard(
            str(message["content"]),
            str(message.get("thinking") or ""),
            [
                Made(str(one.get("id") or ""), str(one["function"]["name"]),
                     one["function"]["arguments"])
                for one in calls
            ],
            cast("int", reply["prompt_eval_count"]),
            cast("int", reply["eval_count"]),
        )  # fmt: skip

    def joined(self, events: Sequence[Json]) -> Json:
        said = [cast("Json", event["message"]) for event in events]
        calls = [one for part in said for one in cast("list[Json]", part.get("tool_calls") or [])]
        message: Json = {
            "role": "assistant",
            "content": "".join(str(part.get("content") or "") for part in said),
            "thinking": "".join(str(part.get("thinking") or "") for part in said),
        }
        return {**events[-1], "message": message | ({"tool_calls": calls} if calls else {})}


WIRES: Final[dict[str, type[Wire]]] = {
    "chat": Chat,
    "messages": Messages,
    "responses": Responses,
    "ollama": Ollama,
}
