"""Client for streamed chat completions on OpenAI's wire that records when each piece arrives.

Works with any server of that wire. Blocks: concurrent conversations need one thread each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import pairwise
from typing import NotRequired, TypedDict

_SECONDS = 300.0
Message = dict[str, str]
Leave = Callable[[int], bool]


class RequestFailedError(RuntimeError):
    """A server did not answer a request, or not completely."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status
        """Of the reply; 0 when there was none, or when it ended too early."""


@dataclass(slots=True)
class Answer:
    """One answer. Times are those of `time.perf_counter`; `pieces` are those that had text."""

    sent: float
    text: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.pieces[0] - self.sent

    @property
    def seconds(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent

    def gaps(self, begin: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between pieces, of those gaps that lie at least partly between two moments."""
        return [b - a for a, b in pairwise(self.pieces) if b > begin and a < end]


class _Delta(TypedDict):
    content: NotRequired[str | None]


class _Choice(TypedDict):
    delta: _Delta
    finish_reason: str | None


class _Details(TypedDict):
    cached_tokens: NotRequired[int]


class _Completion(TypedDict):
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class _Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: NotRequired[_Details | None]
    completion_tokens_details: NotRequired[_Completion | None]


class _Chunk(TypedDict):
    choices: NotRequired[list[_Choice]]
    usage: NotRequired[_Usage | None]
    error: NotRequired[object]


@dataclass(frozen=True, slots=True)
class Client:
    """Talks to the server at a port of this machine, each request on a connection of its own.

    `model` is a name that the server knows its model by. Each `key` is a tenant.
    """

    port: int
    model: str = "default"
    key: str | None = None

    def ask(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        agent: str | None = None,
        seed: int | None = None,
        leave_when: Leave | None = None,
    ) -> Answer:
        """One greedy answer. Raises RequestFailedError when the server does not answer.

        `leave_when` is called after each piece with their number; the client disconnects when it
        returns true, and `finish` is None if the answer had not ended then.
        """
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)
        headers = {"Content-Type": "application/json"}
        if agent is not None:
            headers["X-Agent-ID"] = agent
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        body: dict[str, object] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if seed is not None:
            body["seed"] = seed
        answer = Answer(time.perf_counter())
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                said = response.read(400).decode("utf-8", "replace")
                raise RequestFailedError(f"status {response.status}: {said}", response.status)
            _read(response, answer, leave_when)
        except (OSError, HTTPException) as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        return answer

    def get(self, path: str) -> str:
        """The text at `path`. Raises RequestFailedError."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_SECONDS)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, HTTPException) as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise RequestFailedError(f"status {response.status}: {text}", response.status)
        return text


def _read(response: HTTPResponse, answer: Answer, leave_when: Leave | None) -> None:
    """Read events until the last one, or until the client leaves."""
    for raw in iter(response.readline, b""):
        line = raw.decode("utf-8").strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            answer.ended = time.perf_counter()
            return
        before = len(answer.pieces)
        _take(json.loads(data), answer)
        new = len(answer.pieces) > before and answer.finish is None
        if new and leave_when is not None and leave_when(len(answer.pieces)):
            return
    raise RequestFailedError(f"the stream ended after {len(answer.pieces)} pieces without [DONE]")


def _take(chunk: _Chunk, answer: Answer) -> None:
    if "error" in chunk:
        raise RequestFailedError(f"an error in the stream: {chunk['error']}")
    for choice in chunk.get("choices", []):
        text = choice["delta"].get("content")
        if text:
            answer.pieces.append(time.perf_counter())
            answer.text += text
        answer.finish = choice["finish_reason"] or answer.finish
    usage = chunk.get("usage")
    if usage is not None:
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        drafts = usage.get("completion_tokens_details") or {}
        answer.accepted_tokens = drafts.get("accepted_prediction_tokens", 0)
        answer.rejected_tokens = drafts.get("rejected_prediction_tokens", 0)
