"""Each bad input: one clear error, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from semantic.application.engine.submission import RequestValidator, Submission
from semantic.application.request import Request, Reuse
from semantic.domain.entities import AgentBlocks
from semantic.domain.errors import CacheReconstructionError, InvalidRequestError
from semantic.domain.grammar import Grammar
from semantic.domain.value_objects import ModelCacheSpec, SamplingParams
from tests.support.char_tokenizer import CharTokenizer
from tests.support.fake_backend import FULL, VOCAB, FakeBackend
from tests.support.fake_tokenizer import BOS, ByteTokenizer

Cache = AgentBlocks


def accept(
    agent_id: str = "a",
    prompt: object = (1, 2, 3),
    *,
    cache: Cache | None = None,
    max_tokens: int = 5,
    sampling: SamplingParams | None = None,
    append: bool = False,
    history: tuple[int, ...] | None = None,
    tenant: object = "",
    note: object = "",
    number: int = 7,
) -> Request:
    backend = FakeBackend(ModelCacheSpec((FULL,)))
    submission = Submission(
        agent_id,
        cast("str | list[int]", prompt),
        max_tokens,
        sampling or SamplingParams(),
        tenant=cast(str, tenant),
        note=cast(str, note),
        cache=cache,
        append=append,
    )
    return RequestValidator(backend, CharTokenizer(frozenset({3}))).accept(
        submission, Reuse(history=history), number
    )


def cache(*tokens: int, model_id: str = "fake") -> Cache:
    return Cache("a", token_ids=tokens, model_id=model_id)


def test_a_request_knows_what_was_asked() -> None:
    given = cache(1)
    request = accept("ann", [4, 5], cache=given, max_tokens=9)
    assert (request.agent_id, request.prompt, request.max_tokens) == ("ann", (4, 5), 9)
    assert (request.uid, request.number) == ("request-7", 7)
    assert request.eos_token_ids == {3}
    assert request.given_cache is given


def test_text_becomes_tokens() -> None:
    assert accept(prompt="AB").prompt == (33, 34)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: accept(""), "agent_id must be a non-empty string, got ''"),
        (lambda: accept(cast(str, None)), "agent_id must be a non-empty string, got None"),
        (lambda: accept(prompt=""), "prompt must not be empty"),
        (lambda: accept(prompt=[]), "prompt must not be empty"),
        (lambda: accept(prompt=()), "prompt must not be empty"),
        (lambda: accept(prompt=None), "prompt must be text or token ids, got None"),
        (lambda: accept(prompt=5), "prompt must be text or token ids, got 5"),
        (lambda: accept(prompt=iter([1])), "prompt must be text or token ids"),
        (lambda: accept(prompt=["a"]), "prompt must be text or token ids, got 'a'"),
        (lambda: accept(prompt=[1.0]), r"prompt must be text or token ids, got 1\.0"),
        (lambda: accept(prompt=[True]), "prompt must be text or token ids, got True"),
        (lambda: accept(prompt=[1, VOCAB]), "token id 96 is not in the model's vocabulary of 96"),
        (lambda: accept(prompt=[-1]), "token id -1 is not in the model's vocabulary of 96"),
        (lambda: accept(max_tokens=0), "max_tokens must be at least 1, got 0"),
        (lambda: accept(max_tokens=-3), "max_tokens must be at least 1, got -3"),
        (lambda: accept(max_tokens=cast(int, 1.5)), r"max_tokens must be at least 1, got 1\.5"),
        (lambda: accept(max_tokens=cast(int, "9")), "max_tokens must be at least 1, got '9'"),
        (lambda: accept(max_tokens=True), "max_tokens must be at least 1, got True"),
        (lambda: accept(append=True), "append: agent 'a' has no cache to append to"),
        (lambda: accept(append=True, cache=cache()), "append: agent 'a' has no cache to append to"),
        (
            lambda: accept(sampling=SamplingParams(logit_bias={VOCAB: 1.0})),
            "logit_bias: token ids must be below 96, got 96",
        ),
        (
            lambda: accept(sampling=SamplingParams(logit_bias={-1: 1.0})),
            "logit_bias: token ids must be below 96, got -1",
        ),
    ],
)
def test_a_bad_field_is_named_with_what_was_expected(
    bad: Callable[[], object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        bad()


@pytest.mark.parametrize(("model_id", "named"), [("other", "other"), ("", r"\(unnamed\)")])
def test_a_cache_of_another_model_is_refused(model_id: str, named: str) -> None:
    with pytest.raises(CacheReconstructionError, match=f"computed by model {named}, .* runs fake"):
        accept(cache=cache(1, model_id=model_id))


def test_a_cache_is_checked_also_when_it_is_retired() -> None:
    old = cache(1, model_id="other")
    old.retire()
    with pytest.raises(CacheReconstructionError):
        accept(cache=old)


def test_appended_tokens_follow_the_kept_cache() -> None:
    assert accept(prompt=[9], append=True, history=(1, 2)).prompt == (1, 2, 9)


def test_the_cache_given_goes_before_the_kept_one() -> None:
    request = accept(prompt=[9], append=True, cache=cache(5), history=(1, 2))
    assert request.prompt == (5, 9)


def test_without_append_the_prompt_is_whole() -> None:
    assert accept(prompt=[9], cache=cache(5), history=(1, 2)).prompt == (9,)


def test_only_the_beginning_of_a_conversation_gets_special_tokens() -> None:
    tokenizer = ByteTokenizer()
    backend = FakeBackend(ModelCacheSpec((FULL,)), vocab_size=tokenizer.vocab_size)
    validator = RequestValidator(backend, tokenizer)
    prompts = [
        validator.accept(Submission("a", "hi", 1, append=append), Reuse(history=(4,)), 0).prompt
        for append in (False, True)
    ]
    assert prompts == [(BOS, 104, 105), (4, 104, 105)]


def test_an_empty_text_is_an_empty_prompt_also_where_a_tokenizer_adds_tokens() -> None:
    backend = FakeBackend(ModelCacheSpec((FULL,)), vocab_size=999)
    with pytest.raises(InvalidRequestError, match="prompt must not be empty"):
        RequestValidator(backend, ByteTokenizer()).accept(Submission("a", "", 1), Reuse(), 0)


def test_a_seed_is_drawn_only_when_one_is_needed() -> None:
    assert accept().params.seed is None
    assert accept(sampling=SamplingParams(temperature=1.0, seed=5)).params.seed == 5
    sampled = SamplingParams(temperature=1.0)
    seeds = {accept(sampling=sampled).params.seed for _ in range(20)}
    assert None not in seeds
    assert len(seeds) == 20


def test_a_stop_that_is_no_text_never_reaches_a_step() -> None:
    with pytest.raises(InvalidRequestError, match="stop must contain only non-empty strings"):
        SamplingParams(stop=cast("tuple[str, ...]", (5,)))


def test_tenant_and_note_are_strings() -> None:
    with pytest.raises(InvalidRequestError, match="tenant must be a string"):
        accept(tenant=3)
    for note in (None, "x" * (1 << 21)):
        with pytest.raises(InvalidRequestError, match="note must be a string"):
            accept(note=note)


def test_end_tokens_are_ignored_when_asked() -> None:
    assert accept().eos_token_ids == {3}
    assert accept(sampling=SamplingParams(ignore_eos=True)).eos_token_ids == frozenset()


def test_alternatives_are_bounded() -> None:
    with pytest.raises(InvalidRequestError, match=r"^logprobs must be at most 100, got 101"):
        accept(sampling=SamplingParams(logprobs=101))
    with pytest.raises(InvalidRequestError, match="prompt_logprobs must be at most 100, got 101"):
        accept(sampling=SamplingParams(prompt_logprobs=101))
    most = SamplingParams(logprobs=100, prompt_logprobs=100)
    assert accept(sampling=most).params == most


def test_a_grammar_is_checked_and_goes_with_no_ignored_end() -> None:
    grammar = Grammar("json_schema", "{}")
    with pytest.raises(InvalidRequestError, match="tokens here have no text"):
        accept(sampling=SamplingParams(grammar=grammar))
    with pytest.raises(InvalidRequestError, match="ignore_eos cannot be combined"):
        accept(sampling=SamplingParams(grammar=grammar, ignore_eos=True))


def test_a_grammar_is_compiled_as_its_tenants_own(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Grammar] = []
    monkeypatch.setattr(FakeBackend, "check_grammar", lambda _, grammar: checked.append(grammar))
    sampling = SamplingParams(grammar=Grammar("json_schema", "{}"))
    request = accept(sampling=sampling, tenant="ann")
    assert checked == [request.params.grammar] == [Grammar("json_schema", "{}", tenant="ann")]
