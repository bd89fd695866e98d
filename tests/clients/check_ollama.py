"""Ollama's own client, given nothing but the server's address; and what Open WebUI sends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import httpx  # type: ignore[import-not-found]
import ollama  # type: ignore[import-not-found]
import pytest
from ollama import _types

from tests.clients import ollama_fields, talk


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"It is sunny in {city}."


def test_chat(client: ollama.Client) -> None:
    reply = client.chat(talk.MODEL, [user(talk.HELLO)])
    assert reply.message.content == talk.HELLO_ANSWER
    assert (reply.done, reply.done_reason) == (True, "stop")
    assert reply.prompt_eval_count > 0
    assert reply.eval_count > 1
    assert reply.total_duration >= reply.eval_duration >= 0


def test_hints_are_headers_of_the_client(url: str) -> None:
    client = ollama.Client(host=url, headers={"X-Semantic-Back-In": "5"})
    assert client.chat(talk.MODEL, [user(talk.HELLO)]).message.content == talk.HELLO_ANSWER
    wrong = ollama.Client(host=url, headers={"X-Semantic-Back-In": "soon"})
    with pytest.raises(ollama.ResponseError, match="X-Semantic-Back-In: expected a valid number"):
        wrong.chat(talk.MODEL, [user(talk.HELLO)])


def test_stream(client: ollama.Client) -> None:
    *parts, last = client.chat(talk.MODEL, [user(talk.HELLO)], stream=True)
    assert "".join(part.message.content for part in parts) == talk.HELLO_ANSWER
    assert not any(part.done for part in parts)
    assert last.done
    assert last.eval_count > 1


def test_generate_goes_on_with_its_context(client: ollama.Client) -> None:
    reply = client.generate(talk.MODEL, talk.HELLO)
    assert reply.response == talk.HELLO_ANSWER
    *_, last = client.generate(talk.MODEL, talk.NAME, context=reply.context, stream=True)
    assert client.generate(talk.MODEL, talk.CITY, context=last.context).response == talk.CITY_ANSWER


def test_turns_are_not_computed_again(client: ollama.Client, url: str) -> None:
    """Its client drops our member of the reply, so the replies are read without it."""
    messages = [user(talk.HELLO)]
    prompts, cached = [], []
    for text in (talk.reading("lamp"), talk.NAME, talk.CITY):
        body = {"model": talk.MODEL, "messages": messages, "stream": False}
        reply = httpx.post(f"{url}/api/chat", json=body).json()
        prompts.append(reply["prompt_eval_count"])
        cached.append(reply["semantic"]["cached_tokens"])
        messages += [client.chat(talk.MODEL, messages).message.model_dump(), user(text)]
    assert talk.grows(prompts, cached)


def test_options(client: ollama.Client) -> None:
    options = ollama.Options(num_predict=3, temperature=0.0, seed=7, num_ctx=4096)
    reply = client.chat(talk.MODEL, [user(talk.ENDLESS)], options=options, keep_alive="5m")
    assert (reply.eval_count, reply.done_reason) == (3, "length")
    stopped = client.chat(talk.MODEL, [user(talk.COUNT)], options={"stop": [talk.COUNT_STOP]})
    assert stopped.message.content == talk.COUNT_TO_STOP


def test_format(client: ollama.Client) -> None:
    options = {"num_predict": talk.ROOM_FOR_JSON}
    reply = client.chat(talk.MODEL, [user(talk.WEATHER)], format=talk.CITY_SCHEMA, options=options)
    assert json.loads(reply.message.content)["city"] in talk.CITIES


def test_results_of_tools_are_read(client: ollama.Client) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages: list[Mapping[str, object]] = [
        user(talk.WEATHER),
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": talk.WEATHER_FOUND, "tool_name": "weather"},
    ]
    reply = client.chat(talk.MODEL, messages, tools=[weather], options={"num_predict": 40})
    assert reply.message.content


def test_log_probabilities(client: ollama.Client) -> None:
    reply = client.chat(talk.MODEL, [user(talk.HELLO)], logprobs=True, top_logprobs=2)
    tokens = "".join(one.token for one in reply.logprobs)  # the one that ends the answer too
    assert tokens.startswith(talk.HELLO_ANSWER)
    assert all(len(one.top_logprobs) == 2 for one in reply.logprobs)


def test_models(client: ollama.Client) -> None:
    names = [model.model for model in client.list().models]
    assert f"{talk.MODEL}:latest" in names
    running, vectors = client.ps().models
    assert vectors.model == f"{talk.EMBEDDING_MODEL}:latest"
    assert running.size > 0
    assert running.context_length == 8192
    shown = client.show(f"{talk.MODEL}:latest")
    assert "tools" in shown.capabilities
    assert shown.modelinfo["llama.context_length"] == 8192
    assert client.pull(talk.MODEL).status == "success"


def test_embeddings(client: ollama.Client) -> None:
    reply = client.embed(talk.EMBEDDING_MODEL, talk.EMBEDDED)
    assert talk.are_vectors(reply.embeddings)
    assert reply.prompt_eval_count > len(talk.EMBEDDED)
    alone = client.embed(talk.EMBEDDING_MODEL, talk.EMBEDDED[0], dimensions=8)
    assert [len(one) for one in alone.embeddings] == [8]
    older = client.embeddings(talk.EMBEDDING_MODEL, talk.EMBEDDED[0])
    assert older.embedding == pytest.approx(list(reply.embeddings[0]), abs=1e-5)


def test_errors_are_told_apart(client: ollama.Client) -> None:
    for call, status, problem in (
        (lambda: client.chat("nobody", [user("Hi")]), 404, "no model"),
        (lambda: client.chat(talk.MODEL, [user(talk.TOO_LONG)]), 400, "context"),
        (lambda: client.chat(talk.MODEL, [user("Hi")], options={"mirostat": 2}), 400, "mirostat"),
        (lambda: client.generate(talk.MODEL, "def f(", suffix="end"), 400, "suffix"),
        (lambda: client.pull("org/name"), 403, "semantic models pull"),
    ):
        with pytest.raises(ollama.ResponseError, match=problem) as caught:
            call()  # type: ignore[no-untyped-call]
        assert caught.value.status_code == status


def test_eight_at_once(url: str) -> None:
    async def one(first: int) -> str:
        client = ollama.AsyncClient(host=url)
        reply = await client.chat(talk.MODEL, [user(talk.counting(first)[0])])
        return str(reply.message.content)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one(first) for first in range(1, 9)))

    assert asyncio.run(all_of_them()) == [talk.counting(first)[1] for first in range(1, 9)]


def test_who_leaves_a_stream_is_not_computed_for(url: str) -> None:
    client = ollama.Client(host=url, headers={"X-Agent-ID": "leaves-ollama"})
    options = {"num_predict": 5000}
    stream = client.chat(talk.MODEL, [user(talk.ENDLESS)], stream=True, options=options)
    next(stream)
    stream.close()
    assert talk.tokens_when_idle(url, "leaves-ollama") < 2000


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (_types.ChatRequest, ollama_fields.CHAT),
        (_types.GenerateRequest, ollama_fields.GENERATE),
        (_types.Message, ollama_fields.MESSAGE),
        (_types.Options, ollama_fields.OPTIONS),
        (_types.EmbedRequest, ollama_fields.EMBED),
    ],
)
def test_the_fields_that_tests_without_the_client_use(kind: type, fields: set[str]) -> None:
    assert set(kind.model_fields) == fields  # type: ignore[attr-defined]


def test_what_open_webui_sends(url: str) -> None:
    """Its requests: it lists models, adds a tag to names without one, and asks for a title."""
    assert httpx.get(f"{url}/api/version").json()["version"]
    [model, *_] = httpx.get(f"{url}/api/tags").json()["models"]
    assert httpx.get(f"{url}/api/ps").json()["models"]
    assert httpx.post(f"{url}/api/show", json={"name": model["name"]}).status_code == 200
    body = {
        "model": model["model"],
        "messages": [user(talk.HELLO)],
        "options": {"temperature": 0.0, "num_ctx": 2048, "num_keep": 24, "stop": []},
        "stream": True,
        "keep_alive": "5m",
        "format": "",
        "think": None,
        "tools": [],
        "metadata": {"chat_id": "1", "task": "title_generation"},
    }
    with httpx.stream("POST", f"{url}/api/chat", json=body) as reply:
        parts = [json.loads(line) for line in reply.iter_lines()]
    assert "".join(part["message"]["content"] for part in parts) == talk.HELLO_ANSWER
    assert parts[-1]["done"]
