"""OpenAI's own client against the embedded model: scores agree with answers, schemas are kept."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator

import openai
import pytest
from openai.types import CompletionChoice
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from semantic import load
from semantic.application.serving import Serving
from semantic.composition.engine_settings import Settings
from semantic.domain.chat import Chat, Message
from semantic.serve import ServeSettings, load_serving
from tests.support.http_server import running
from tests.support.rounding import most_rounding

pytestmark = pytest.mark.process

MODEL = "semantic-tiny"
PROMPT = "Once upon a time"
STORY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story"}]


Served = Serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    wanted = ServeSettings(Settings(pool_blocks=400), max_context=512)
    found = asyncio.run(load_serving(wanted))
    yield found
    asyncio.run(found.close())


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with (
        running(served) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def near() -> float:
    """What rounding costs the served model."""
    model, _ = load()
    return most_rounding(model.model)


def scores(choice: CompletionChoice) -> list[float]:
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    return choice.logprobs.token_logprobs


def test_a_prompt_scores_as_it_was_answered(
    client: openai.OpenAI, served: Served, near: float
) -> None:
    """The log-probabilities of an answer are those of the same tokens as a prompt."""

    def ask(prompt: list[int], max_tokens: int) -> CompletionChoice:
        return client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
        ).choices[0]

    asked = list(asyncio.run(served.tokenize(Chat((Message("user", "Tell me a story"),)))))
    answered = ask(asked, 12)
    text = answered.text.removeprefix(ask(asked, 0).text)
    answer = asyncio.run(served.tokenize(text, add_special_tokens=False))
    assert len(answer) == 12, "the model's own text reads as the tokens that it wrote"
    again = ask([*asked, *answer], 0)
    assert again.text == answered.text
    assert scores(again)[0] is None
    assert scores(again)[1:] == pytest.approx(scores(answered)[1:], abs=near)


def test_prompts_together_score_as_each_alone(client: openai.OpenAI, near: float) -> None:
    prompts = [[3, 34], [5, 34, 35], [7, 8, 9, 10]]

    def ask(tokens: list[list[int]]) -> list[CompletionChoice]:
        return client.completions.create(
            model=MODEL,
            prompt=tokens,
            echo=True,
            logprobs=1,
            max_tokens=1,
            temperature=0,
            seed=1234,
        ).choices

    for prompt, together in zip(prompts, ask(prompts), strict=True):
        [alone] = ask([prompt])
        assert len(scores(together)) == len(prompt) + 1
        assert scores(together)[1:] == pytest.approx(scores(alone)[1:], abs=near)


def test_a_seed_fixes_every_choice(client: openai.OpenAI) -> None:
    def ask(seed: int, n: int) -> list[str]:
        reply = client.completions.create(
            model=MODEL, prompt=PROMPT, n=n, seed=seed, temperature=1.5, max_tokens=8
        )
        return [choice.text for choice in reply.choices]

    three = ask(7, 3)
    assert three == ask(7, 3)
    assert three[1:] == ask(8, 2)
    assert len(set(three)) > 1


def test_streams_and_replies_say_the_same(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=24)
    stream = client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=24, stream=True)
    choices = list(itertools.chain.from_iterable(chunk.choices for chunk in stream))
    texts = (choice.delta.content or "" for choice in choices)
    assert "".join(texts) == reply.choices[0].message.content
    assert choices[-1].finish_reason == reply.choices[0].finish_reason


def test_what_was_answered_before_is_told_as_cached(client: openai.OpenAI) -> None:
    def cached() -> int:
        reply = client.completions.create(model=MODEL, prompt=[11] * 20, max_tokens=1)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    assert (cached(), cached()) == (0, 19)


class Place(BaseModel):
    """What an answer must be."""

    floor: int
    attic: bool


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=STORY, response_format=Place, max_tokens=300, temperature=1, seed=1
    )
    assert isinstance(reply.choices[0].message.parsed, Place)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0, 1), (1e-39, 1), (5e-324, 1), (1, 1e-300), (2, 0)]
)
def test_next_to_nothing_is_the_likeliest_token_alone(
    client: openai.OpenAI, temperature: float, top_p: float
) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=STORY, temperature=temperature, top_p=top_p, seed=1, max_tokens=12
    )
    likeliest = client.chat.completions.create(
        model=MODEL,
        messages=STORY,
        temperature=1,
        logit_bias={},
        extra_body={"top_k": 1},
        max_tokens=12,
    )
    assert reply.choices[0].message.content == likeliest.choices[0].message.content


@pytest.mark.parametrize("stop", ['"name"', '"arg', "{"])
def test_a_stop_string_inside_a_call_ends_the_answer_without_it(
    client: openai.OpenAI, stop: str
) -> None:
    """The call is not known to be wrong: the model was stopped before it had written it."""
    reply = client.chat.completions.create(
        model=MODEL,
        messages=STORY,
        tools=[{"type": "function", "function": {"name": "look"}}],
        tool_choice="required",
        stop=[stop],
        max_tokens=200,
        temperature=0,
    )
    [choice] = reply.choices
    assert choice.finish_reason == "stop"
    assert not choice.message.tool_calls
    assert not (choice.message.content or "").strip()


def ask_for(client: openai.OpenAI, schema: dict[str, object]) -> str:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=STORY,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": schema},
        },
    )
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}/[ab]{1,3}x"}}, "[0-9]{3}/[ab]{1,3}x"),
        ({"guided_choice": ["Oslo", 'Rome "x"']}, 'Oslo|Rome "x"'),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]{2}/ | "}"'}, "a([0-9]{2}|})"),
        ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[0-9]{2}"),
    ],
)
def test_vllms_constraints_are_enforced(
    client: openai.OpenAI, constraint: dict[str, object], pattern: str
) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=STORY, max_tokens=40, extra_body=constraint
    )
    plain = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=40, extra_body=constraint
    )
    for text in (chat.choices[0].message.content, plain.choices[0].text):
        assert re.fullmatch(pattern, text or ""), text


def test_a_grammar_of_a_clients_is_compiled_within_limits_first(client: openai.OpenAI) -> None:
    """Also a short one, in another process."""
    for constraint in ({"guided_regex": "(?=a)"}, {"guided_grammar": "start: nothing"}):
        with pytest.raises(openai.BadRequestError, match="lark: "):
            client.completions.create(model=MODEL, prompt=PROMPT, extra_body=constraint)
        with pytest.raises(openai.BadRequestError, match="lark: "):
            client.chat.completions.create(model=MODEL, messages=STORY, extra_body=constraint)


def test_a_schema_that_may_be_expensive_is_checked_first(client: openai.OpenAI) -> None:
    assert (
        int(ask_for(client, {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999})) % 7
        == 0
    )
    for _ in range(2):
        with pytest.raises(
            openai.BadRequestError, match=r"cannot enforce the answer's format: .*look-around"
        ):
            ask_for(client, {"type": "string", "pattern": "(?=a)"})
