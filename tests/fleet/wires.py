"""Requests of every wire, which must be answered through a proxy as without it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping

Json = dict[str, object]

MODEL = "semantic-tiny"


def ask(
    url: str, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """The status and the body of an answer: to a POST of `body` as JSON, or to a GET."""
    data = None if body is None else json.dumps(body).encode()
    wanted = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, wanted)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def chat(text: str, *later: object, **more: object) -> Json:
    messages: list[object] = [{"role": "user", "content": text}, *later]
    return {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, **more}


WIRES: dict[str, tuple[str, Json, str]] = {
    "chat": ("/v1/chat/completions", chat("Hi"), "choices"),
    "messages": ("/v1/messages", chat("Hi"), "content"),
    "count": ("/v1/messages/count_tokens", {"model": MODEL, "messages": chat("Hi")["messages"]},
              "input_tokens"),
    "responses": ("/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 20,
                                    "temperature": 0}, "output"),
    "completions": ("/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 6,
                                        "temperature": 0}, "choices"),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": "Hi there"}, "tokens"),
}  # fmt: skip
STREAMED = {"chat": "[DONE]", "messages": "message_stop", "responses": "response.completed",
            "completions": "[DONE]"}  # fmt: skip


def check_wires(proxy: str, server: str) -> None:
    """Whole answers through `proxy` are those of `server` alone; streams end as they should."""
    for path, body, field in WIRES.values():
        status, found = ask(proxy + path, body)
        _, alone = ask(server + path, body)
        assert status == 200, found
        assert json.loads(found)[field] is not None
        assert said(json.loads(found)) == said(json.loads(alone))
    for name, last in STREAMED.items():
        path, body, _ = WIRES[name]
        status, found = ask(proxy + path, {**body, "stream": True})
        assert status == 200
        assert last in found.decode()
        assert found.count(b"data: ") > 3
    status, found = ask(f"{proxy}/v1/agents")
    assert status == 200
    assert json.loads(found)["data"] is not None


def said(found: object) -> list[object]:
    """The texts and tokens of an answer, without what differs between two of the same."""
    match found:
        case {"text": str(text)} | {"content": str(text)}:
            return [text]
        case {"tokens": list(tokens)}:
            return tokens
        case dict():
            return [one for value in found.values() for one in said(value)]
        case list():
            return [one for value in found for one in said(value)]
    return []


def cached(answer: bytes) -> int:
    """The prompt tokens of a chat completion that were cached."""
    found: int = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found
