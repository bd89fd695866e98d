"""Ollama's wire over the embedded model: calls without ids are found again, and what a model is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
from starlette.testclient import TestClient

from semantic.application.engine.step_loop import StepLoop
from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import AnswerEnd, AnswerEvent, TextDelta, ToolCallDelta, ToolCallStarted
from semantic.domain.chat import Chat, Message, Tool, ToolCall, ToolChoice
from semantic.domain.value_objects import SamplingParams
from semantic.ports.embedding import Embedded
from semantic.ports.serving import Ask
from semantic.serve import ServeSettings, load_embeddings, load_serving
from semantic_server.http.app import create_app
from tests.support.embedding_model import WIDTH, write_embedding_model

pytestmark = pytest.mark.process

Json = dict[str, object]

LOOK = Tool("look", parameters={"type": "object", "properties": {"far": {"type": "boolean"}}})
CALLED = Chat((Message("user", "Look!"),), (LOOK,), ToolChoice("required", "look"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    vectors = write_embedding_model(tmp_path_factory.mktemp("models") / "vectors")

    async def load() -> Serving:
        loop = StepLoop()
        embedding = await load_embeddings(str(vectors), ("vectors",), loop)
        settings = ServeSettings(Settings(pool_blocks=400), max_context=512)
        found = await load_serving(settings, loop=loop)
        found.embedding = embedding
        return found

    found = asyncio.run(load())
    yield found
    asyncio.run(found.close())


async def answered(served: Serving, chat: Chat) -> list[AnswerEvent]:
    ask = Ask(chat, SamplingParams(), 60, numbered_calls=True)
    return [event async for event in served.answer(ask)]


def test_a_numbered_call_is_found_again_by_its_place(served: Serving) -> None:
    """The next turn continues the tokens in which the call was generated."""
    events = asyncio.run(answered(served, CALLED))
    [started] = [event for event in events if isinstance(event, ToolCallStarted)]
    assert started.id == "call_0"
    arguments = "".join(e.arguments for e in events if isinstance(e, ToolCallDelta))
    call = ToolCall("call_0", "look", arguments)
    seen = (
        *CALLED.messages,
        Message("assistant", tool_calls=(call,)),
        Message("tool", "A ship.", tool_call_id="call_0", name="look"),
    )
    first, second = events[-1], asyncio.run(answered(served, replace(CALLED, messages=seen)))
    assert isinstance(first, AnswerEnd)
    end = second[-1]
    assert isinstance(end, AnswerEnd)
    assert end.usage.cached >= first.usage.prompt + first.usage.completion - 1
    [again] = [event for event in second if isinstance(event, ToolCallStarted)]
    assert again.id == "call_1"


def test_vectors_are_computed_while_an_answer_is(served: Serving) -> None:
    """Both models share one thread; each has the results that it has alone."""
    embedding = served.embedding
    assert embedding is not None
    assert (embedding.model.names, embedding.model.dimensions) == (("vectors",), WIDTH)
    story = Chat((Message("user", "Tell me a story"),))

    async def together() -> tuple[list[AnswerEvent], Embedded]:
        return await asyncio.gather(
            answered(served, story), embedding.embed(("Oslo", "A ship " * 300), keep=False)
        )

    events, found = asyncio.run(together())
    assert _text(events) == _text(asyncio.run(answered(served, story)))
    assert found == asyncio.run(embedding.embed(("Oslo", "A ship " * 300)))


def _text(events: list[AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_what_the_embedded_model_is(served: Serving) -> None:
    app = create_app(served)
    app.state.context.embedding = served.embedding
    client = TestClient(app, "http://127.0.0.1:8000")
    model, _, _ = client.get("/api/tags").json()["models"]
    assert model["name"] == "semantic-tiny:latest"
    assert model["details"]["parameter_size"] == "3.7M"
    assert model["details"]["quantization_level"] == "f16"
    assert len(model["digest"]) == 64
    running, _ = client.get("/api/ps").json()["models"]
    assert model["size"] < running["size"]  # on a CPU the weights are fp32
    shown = client.post("/api/show", json={"model": "semantic-tiny"}).json()
    info = cast(Json, shown["model_info"])
    assert info["general.architecture"] == "llama"
    assert info["general.parameter_count"] == running["size"] // 4
    assert info["llama.context_length"] == 512
    assert "add_generation_prompt" in shown["template"]
    listed = client.get("/api/v0/models/semantic-tiny").json()
    assert listed["max_context_length"] > listed["loaded_context_length"] == 512
