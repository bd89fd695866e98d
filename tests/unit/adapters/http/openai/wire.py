"""Requests to the routes of OpenAI's wire over a scripted model, and what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from fastapi import FastAPI
from starlette.testclient import TestClient

from semantic.domain.answer import AnswerEvent, AnswerStarted, PromptScored, TextDelta
from semantic.domain.value_objects import TokenLogprob
from semantic.ports.serving import Ask
from semantic_server.http.app import create_app
from tests.support.fake_serving import FakeServing, Script

Json = dict[str, object]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES: list[Json] = [{"role": "user", "content": "Hello"}]


@dataclass
class Wire:
    """A wire under test. `fake` remembers what was asked."""

    fake: FakeServing

    @property
    def client(self) -> TestClient:
        """A client of the one application there is, which now serves `fake`."""
        app = _app()
        app.state.context.serving = self.fake
        return TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False)

    def post(self, path: str, body: Json, headers: dict[str, str] | None = None) -> Json:
        """The reply to a request that succeeds."""
        response = self.client.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return cast(Json, response.json())

    def chat(self, **fields: object) -> Json:
        return self.post(CHAT, {"model": "fake", "messages": MESSAGES, **fields})

    def complete(self, **fields: object) -> Json:
        return self.post(COMPLETIONS, {"model": "fake", "prompt": "Once", **fields})

    def stream(self, path: str, **fields: object) -> list[str]:
        """The data of each event of a stream."""
        what: Json = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once"}
        body = {"model": "fake", "stream": True, **what, **fields}
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n")
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    def chunks(self, path: str, **fields: object) -> list[Json]:
        """The chunks of a stream that ends well."""
        *chunks, done = self.stream(path, **fields)
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def error(self, path: str, status: int = 400, /, **fields: object) -> Json:
        """The error that a request ends with."""
        what: Json = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once"}
        body = {"model": "fake", **what, **fields}
        given = {name: value for name, value in body.items() if value is not MISSING}
        response = self.client.post(path, json=given)
        assert response.status_code == status, response.text
        return cast(Json, response.json()["error"])

    @property
    def ask(self) -> Ask:
        """The one thing that was asked."""
        [ask] = self.fake.asked
        return ask


MISSING = object()
"""In place of a field that a request must have."""


def wire_of(script: Callable[[Ask], Script] | Script | None = None) -> Wire:
    """A wire over a model that answers by `script`."""
    scripted = script if callable(script) else lambda _: script or Script()
    return Wire(ScoringServing(scripted))


@lru_cache(maxsize=1)
def _app() -> FastAPI:
    """Made once: a test makes hundreds of requests."""
    return create_app()


class ScoringServing(FakeServing):
    """Scores prompts when asked to: each token is likelier than the one before it."""

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        """See `ServingPort.answer`."""
        async with aclosing(super().answer(ask)) as events:
            async for event in events:
                yield event
                top = ask.sampling.prompt_logprobs
                if isinstance(event, AnswerStarted) and top is not None:
                    tokens = await self.tokenize(ask.prompt)
                    scores = [scored(token, top, -1.0 / i) for i, token in enumerate(tokens, 1)]
                    yield PromptScored(tokens, (None, *scores[1:]))


def scored(token: int, top: int = 1, logprob: float = -0.5) -> TokenLogprob:
    """A token's log-probability, the likeliest being `z`, then `y` and so on."""
    others = tuple((ord("z") - i, -0.25 * (i + 1)) for i in range(top))
    return TokenLogprob(token, logprob, others)


def spelled(text: str, top: int = 1) -> tuple[TextDelta, ...]:
    """A text character by character, with log-probabilities."""
    return tuple(TextDelta(c, (scored(ord(c), top),)) for c in text)


def at(value: object, *path: str | int) -> object:
    """What stands in a JSON value at `path`."""
    for part in path:
        assert isinstance(value, (dict, list)), f"nothing at {part!r}: {value!r}"
        value = value[part]  # type: ignore[index]
    return value
