"""Completions: prompts of every kind, echoes with log-probabilities, choices in their order."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from operator import itemgetter
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from semantic.domain.answer import TextDelta
from semantic.domain.value_objects import SamplingParams, TokenLogprob
from semantic.ports.serving import Ask
from tests.support.fake_serving import Script
from tests.support.lanes import examples
from tests.unit.adapters.http.openai.wire import (
    COMPLETIONS,
    MISSING,
    Json,
    Wire,
    at,
    scored,
    spelled,
    wire_of,
)


def checked(reply: Json) -> Json:
    """A reply or chunk that fits the SDK's type, but for what OpenAI's own server sends too.

    Chunks have no finish reason before their last, and a prompt's first token no probability.
    """
    told = copy.deepcopy(reply)
    for choice in cast(list[Json], told["choices"]):
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name, entries in cast(dict[str, list[object]], choice["logprobs"] or {}).items():
            filler: object = {} if name == "top_logprobs" else 0.0
            entries[:] = [filler if one is None else one for one in entries]
    Completion.model_validate(told, strict=True)
    return reply


def completed(script: Script | None = None, **fields: object) -> Json:
    return checked(wire_of(script).complete(**fields))


def asked(**fields: object) -> Sequence[Ask]:
    wire = wire_of()
    wire.complete(**fields)
    return wire.fake.asked


def summed(chunks: Sequence[Json]) -> list[Json]:
    """The choices of a stream, added up."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for choice in copy.deepcopy(cast(list[Json], chunk["choices"])):
            known = choices.setdefault(cast(int, choice["index"]), {"text": "", "logprobs": None})
            known["index"] = choice["index"]
            known["text"] = f"{known['text']}{choice['text']}"
            known["finish_reason"] = choice["finish_reason"]
            if known["logprobs"] is None:
                known["logprobs"] = choice["logprobs"]
            elif choice["logprobs"]:
                for name, entries in cast(dict[str, list[object]], choice["logprobs"]).items():
                    cast(dict[str, list[object]], known["logprobs"])[name] += entries
    return [choices[index] for index in sorted(choices)]


def test_a_reply() -> None:
    reply = completed(Script((TextDelta("up"), TextDelta("on")), cached=1, completion=2))
    assert str(reply.pop("id")).startswith("cmpl-")
    assert isinstance(reply.pop("created"), int)
    assert str(reply.pop("system_fingerprint")).startswith("fp_")
    assert reply == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": "upon", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 3},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
            "semantic": {"lost": None},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Once", ["Once"]),
        (["a", "b"], ["a", "b"]),
        ([3, 34], [(3, 34)]),
        ([[3, 34], [5]], [(3, 34), (5,)]),
        (["a", [5]], ["a", (5,)]),
    ],
)
def test_prompts(prompt: object, expected: list[object]) -> None:
    assert [ask.prompt for ask in asked(prompt=prompt)] == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (MISSING, "prompt"),
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ({}, "prompt"),
        ([""], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, "a"], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([2**31], "prompt[0]"),
        ([1, 2, 0x110000], "prompt[2]"),
        ([[1], [2, 0x110000]], "prompt[1][1]"),
        ([True], "prompt[0]"),
        ([[1, True]], "prompt[0]"),
        ([[1.5]], "prompt[0]"),
        ([[[1]]], "prompt[0]"),
    ],
)
def test_wrong_prompts_are_refused_by_place(prompt: object, param: str) -> None:
    wire = wire_of()
    assert wire.error(COMPLETIONS, prompt=prompt)["param"] == param
    assert wire.fake.asked == []


def test_16_tokens_unless_it_says_otherwise() -> None:
    assert [asked()[0].max_tokens, asked(max_tokens=99)[0].max_tokens] == [16, 99]


def test_sampling() -> None:
    [ask] = asked(temperature=0.5, seed=3, stop="x", logprobs=2, min_p=0.1)
    expected = SamplingParams(temperature=0.5, seed=3, stop=("x",), logprobs=2, min_p=0.1)
    assert ask.sampling == expected


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"n": 65, "prompt": ["a", "b"]}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_wrong_values(given: Json, param: str) -> None:
    wire = wire_of()
    assert wire.error(COMPLETIONS, **given)["param"] == param
    assert wire.fake.asked == []


@pytest.mark.parametrize("given", [{"best_of": 1}, {"best_of": 2, "n": 2}, {"n": 64}])
def test_values_at_their_edge(given: Json) -> None:
    n = cast(int, given.get("n", 1))
    prompt = ["a", "b"] if n == 64 else "a"
    assert len(asked(prompt=prompt, **given)) == n * (2 if n == 64 else 1)


def by_prompt(ask: Ask) -> Script:
    """Answers with the prompt and the seed."""
    return Script(spelled(f"{ask.prompt}{ask.sampling.seed}"), cached=ask.sampling.seed or 0)


def test_each_prompt_has_its_choices_in_their_order() -> None:
    wire = wire_of(by_prompt)
    fields: Json = {"prompt": ["aaa", "b"], "n": 2, "seed": 1, "agent_id": "ada"}
    reply = checked(wire.complete(**fields))
    choices = cast(list[Json], reply["choices"])
    assert [choice["text"] for choice in choices] == ["aaa1", "aaa2", "b1", "b2"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [ask.agent for ask in wire.fake.asked] == ["ada", "ada/2", "ada/3", "ada/4"]
    assert at(reply, "usage", "prompt_tokens") == 4
    assert at(reply, "usage", "completion_tokens") == 12
    assert at(reply, "usage", "prompt_tokens_details", "cached_tokens") == 2


def test_a_stream_of_several_choices() -> None:
    wire = wire_of(by_prompt)
    fields: Json = {"prompt": ["aaa", "b"], "n": 2, "seed": 1}
    reply = wire.complete(**fields)
    chunks = wire.chunks(COMPLETIONS, stream_options={"include_usage": True}, **fields)
    for chunk in chunks:
        checked(chunk)
    assert summed(chunks) == reply["choices"]
    assert chunks[-1]["usage"] == reply["usage"]
    order = [at(chunk, "choices", 0, "index") for chunk in chunks[:-1]]
    assert order != sorted(cast(list[int], order)), "choices are sent as they come"


def test_a_stream_tells_running_usage_at_the_end_of_each_choice() -> None:
    options = {"continuous_usage_stats": True}
    chunks = wire_of(by_prompt).chunks(COMPLETIONS, n=2, seed=1, stream_options=options)
    told = [at(chunk, "usage", "completion_tokens") for chunk in chunks if chunk["usage"]]
    assert told == [5, 10, 10]


# --- echo and log-probabilities -----------------------------------------------------------------


def test_logprobs() -> None:
    reply = completed(Script(spelled("hé", top=1)), logprobs=1)
    assert at(reply, "choices", 0, "logprobs") == {
        "tokens": ["h", "é"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"z": -0.25, "h": -0.5}, {"z": -0.25, "é": -0.5}],
        "text_offset": [0, 1],
    }


def test_of_two_tokens_with_one_text_the_likelier_counts() -> None:
    twins = TokenLogprob(65, -3.0, ((65, -1.0), (66, float("-inf")), (66, -2.0)))
    reply = completed(Script((TextDelta("A", (twins,)),)), logprobs=3)
    assert at(reply, "choices", 0, "logprobs", "top_logprobs") == [{"A": -1.0, "B": -2.0}]


@pytest.mark.parametrize("prompt", ["Once", list(map(ord, "Once"))])
def test_echo(prompt: object) -> None:
    fields: Json = {"prompt": prompt, "echo": True}
    reply = completed(Script((TextDelta(" upon"),)), **fields)
    assert at(reply, "choices", 0, "text") == "Once upon"
    assert at(reply, "choices", 0, "logprobs") is None
    chunks = wire_of(Script((TextDelta(" upon"),))).chunks(COMPLETIONS, **fields)
    assert [at(chunk, "choices", 0, "text") for chunk in chunks] == ["Once", " upon", ""]


def test_echo_with_logprobs_has_every_token() -> None:
    fields: Json = {"prompt": "On", "echo": True, "logprobs": 1}
    script = Script(spelled("ce"))
    wire = wire_of(script)
    reply = checked(wire.complete(**fields))
    assert wire.ask.sampling.prompt_logprobs == 1
    assert at(reply, "choices", 0, "text") == "Once"
    assert at(reply, "choices", 0, "logprobs") == {
        "tokens": ["O", "n", "c", "e"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"z": -0.25, "n": -0.5},
            {"z": -0.25, "c": -0.5},
            {"z": -0.25, "e": -0.5},
        ],
        "text_offset": [0, 1, 2, 3],
    }
    assert summed(wire.chunks(COMPLETIONS, **fields)) == reply["choices"]


def test_without_echo_the_prompt_is_not_scored() -> None:
    [ask] = asked(logprobs=1)
    assert (ask.sampling.logprobs, ask.sampling.prompt_logprobs) == (1, None)


def test_only_scoring_a_prompt() -> None:
    fields: Json = {"prompt": "On", "echo": True, "logprobs": 0, "max_tokens": 0}
    wire = wire_of(Script(spelled("x")))
    reply = checked(wire.complete(**fields))
    assert wire.ask.max_tokens == 1
    assert at(reply, "choices", 0, "text") == "On"
    assert at(reply, "choices", 0, "logprobs", "token_logprobs") == [None, -0.5]
    assert at(reply, "choices", 0, "finish_reason") == "length"
    assert at(reply, "usage", "completion_tokens") == 0
    assert summed(wire.chunks(COMPLETIONS, **fields)) == reply["choices"]


def test_a_token_without_a_text_has_its_place() -> None:
    # The end token is generated and has no text; who scores leaves out the last entry.
    fields: Json = {"prompt": "On", "echo": True, "logprobs": 1, "max_tokens": 1}
    reply = completed(Script((), completion=1), **fields)
    assert at(reply, "choices", 0, "logprobs", "tokens") == ["O", "n", ""]
    assert at(reply, "choices", 0, "logprobs", "token_logprobs") == [None, -0.5, None]
    assert at(reply, "choices", 0, "logprobs", "text_offset") == [0, 1, 2]


def lm_eval(reply: Json, ctxlens: Sequence[int]) -> list[tuple[float, bool]]:
    """What lm-eval 0.4.13 (`local-completions`) reads of a reply, as it reads it."""
    found = []
    choices = sorted(cast(list[Json], reply["choices"]), key=itemgetter("index"))
    for choice, ctxlen in zip(choices, ctxlens, strict=True):
        logprobs = cast(Json, choice["logprobs"])
        tokens = cast(list[float], logprobs["token_logprobs"])[ctxlen:-1]
        top = cast(list[dict[str, float]], logprobs["top_logprobs"])[ctxlen:-1]
        greedy = all(tok == max(t.values()) for tok, t in zip(tokens, top, strict=True))
        found.append((sum(tokens), greedy))
    return found


@pytest.mark.parametrize("ends", [True, False])
def test_what_lm_eval_asks_and_reads(ends: bool) -> None:
    answer = Script((), completion=1) if ends else Script(spelled("x"))
    wire = wire_of(answer)
    reply = checked(
        wire.complete(
            prompt=[[3, 34], [5, 34, 35]],
            echo=True,
            logprobs=1,
            max_tokens=1,
            temperature=0,
            seed=1234,
        )
    )
    assert [ask.prompt for ask in wire.fake.asked] == [(3, 34), (5, 34, 35)]
    assert [ask.sampling.seed for ask in wire.fake.asked] == [1234, 1234]
    third = -1.0 / 3
    assert lm_eval(reply, [1, 1]) == [(-0.5, False), (-0.5 + third, False)]


def test_lm_eval_sees_that_a_token_is_the_likeliest() -> None:
    likely = TokenLogprob(1, -0.125, ((1, -0.125),))
    script = Script((TextDelta("\1", (likely,)), TextDelta("x", (scored(ord("x")),))))
    reply = completed(script, prompt=[[3]], echo=True, logprobs=1, max_tokens=2)
    assert lm_eval(reply, [1]) == [(-0.125, True)]


# --- errors and any answer ------------------------------------------------------------------------


def test_an_answer_that_fails() -> None:
    script = Script((TextDelta("a"),), reason="error", error="secret")
    assert wire_of(script).error(COMPLETIONS, 500)["code"] == "answer_failed"
    *chunks, last = wire_of(script).stream(COMPLETIONS)
    assert [at(json.loads(chunk), "choices", 0, "text") for chunk in chunks] == ["", "a"]
    assert at(json.loads(last), "error", "code") == "answer_failed"


@pytest.mark.parametrize(("reason", "finish"), [("stop", "stop"), ("length", "length")])
def test_finish_reasons(reason: str, finish: str) -> None:
    script = Script((TextDelta("a"),), reason)  # type: ignore[arg-type]
    assert at(completed(script), "choices", 0, "finish_reason") == finish


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@settings(max_examples=examples(40, thorough=400), deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=3), st.lists(TEXT, max_size=3), st.booleans())
def test_streams_and_replies_say_the_same(prompts: list[str], texts: list[str], echo: bool) -> None:
    wire: Wire = wire_of(Script(tuple(piece for text in texts for piece in spelled(text))))
    fields: Json = {"prompt": prompts, "echo": echo, "logprobs": 2}
    reply = checked(wire.complete(**fields))
    chunks = wire.chunks(COMPLETIONS, stream_options={"include_usage": True}, **fields)
    assert summed(chunks) == reply["choices"]
    assert chunks[-1]["usage"] == reply["usage"]
    for prompt, choice in zip(prompts, cast(list[Json], reply["choices"]), strict=True):
        assert choice["text"] == (prompt if echo else "") + "".join(texts)
        offsets = at(choice, "logprobs", "text_offset") if choice["logprobs"] else []
        assert offsets == list(range(len(choice["text"])))
