"""Answers held to a grammar: always in the language, alone, in a batch and over a preemption."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import cast

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import semantic
from semantic import SamplingParams
from semantic.adapters.mlx.sampling.grammar_compiler import GrammarCompiler
from semantic.adapters.mlx.sampling.token_mask import GrammarMask
from semantic.domain.errors import InvalidRequestError
from semantic.domain.grammar import Grammar
from tests.integration.test_exactness import prompts
from tests.support.lanes import examples, more
from tests.support.rig import Done, Rig
from tests.support.text_tokenizer import id_of, text_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def json_grammar(schema: object, after: str | None = None) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), after)


def rig(architecture: str = "llama", *, columns: int = 200) -> Rig:
    return Rig(architecture, columns=columns, chunk=64, texts=text_tokenizer())


def held(grammar: Grammar, seed: int | None = None, logprobs: int | None = None) -> SamplingParams:
    """Greedy unless there is a seed."""
    temperature = 0.0 if seed is None else 1.0
    return SamplingParams(temperature=temperature, seed=seed, logprobs=logprobs, grammar=grammar)


def check_person(done: Done) -> None:
    assert done.finish_reason == "stop", done
    person = json.loads(done.text)
    assert set(person) == {"name", "age", "tags"}
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 8
    assert 0 <= person["age"] <= 120
    assert len(person["tags"]) <= 3
    assert set(person["tags"]) <= {"a", "b"}


# In an engine


@pytest.mark.parametrize("architecture", ["llama", *more("gemma3", "gpt_oss")])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_an_answer_fits_its_schema(architecture: str, seed: int | None) -> None:
    of = rig(architecture)
    (prompt,) = prompts(30, seed=1)
    check_person(of.answer("ann", prompt, 400, sampling=held(json_grammar(PERSON), seed)))
    of.check()


def test_rows_of_a_batch_do_not_notice_that_a_neighbour_is_held() -> None:
    texts = prompts(30, 300, 45, 260, seed=2)
    grammar = json_grammar(PERSON)
    wanted = [
        held(grammar, 5),
        SamplingParams(),
        held(grammar),
        SamplingParams(temperature=1, seed=3),
    ]
    alone = [rig().answer("x", text, 30, sampling=p) for text, p in zip(texts, wanted, strict=True)]
    of = rig()
    uids = [
        of.engine.submit(f"a{i}", text, max_tokens=30, sampling=params)
        for i, (text, params) in enumerate(zip(texts, wanted, strict=True))
    ]
    done = of.run()
    assert [done[uid].tokens for uid in uids] == [one.tokens for one in alone]


def test_a_preempted_answer_goes_on_in_its_grammar() -> None:
    texts = prompts(240, 250, 245, 248, seed=3)
    grammars = [json_grammar(PERSON, after) for after in (None, "a", None, " ")]
    wanted = [held(g, seed) for g, seed in zip(grammars, (None, 4, 6, 7), strict=True)]
    alone = [rig().answer("x", text, 40, sampling=p) for text, p in zip(texts, wanted, strict=True)]
    of = rig(columns=5)
    uids = [
        of.engine.submit(f"a{i}", text, max_tokens=40, sampling=params)
        for i, (text, params) in enumerate(zip(texts, wanted, strict=True))
    ]
    done = of.run()
    assert of.engine.preemptions > 0
    assert [done[uid].tokens for uid in uids] == [one.tokens for one in alone]


def test_a_language_begins_when_the_text_before_it_was_written() -> None:
    of = rig()
    (prompt,) = prompts(20, seed=4)
    # Each of the tokens before the mark is as it would be without a grammar, but no end token.
    free = of.answer("ann", prompt, 60, sampling=SamplingParams(logit_bias={95: -1000.0}))
    mark = free.text[20:22]
    at = free.text.index(mark) + 2
    done = of.answer("ben", prompt, 400, sampling=held(json_grammar(PERSON, mark)))
    assert done.text[:at] == free.text[:at]
    assert json.loads(done.text[at:])
    assert done.finish_reason == "stop"


def test_an_answer_cannot_end_before_its_language() -> None:
    of = rig()
    likes_to_end = SamplingParams(grammar=json_grammar(PERSON, after="QQ"), logit_bias={95: 100.0})
    assert of.answer("ann", [1, 2, 3], 30, sampling=likes_to_end).finish_reason == "length"
    likes_to_end = SamplingParams(grammar=json_grammar(PERSON), logit_bias={95: 100.0})
    check_person(of.answer("ben", [1, 2, 3], 400, sampling=likes_to_end))


def test_log_probabilities_of_a_held_answer_are_finite() -> None:
    of = rig()
    done = of.answer("ann", [1, 2], 10, sampling=held(Grammar("lark", 'start: "abcd"'), logprobs=5))
    assert done.text == "abcd"
    assert [one.logprob for one in done.logprobs] == pytest.approx([0.0] * 5)
    assert [[token for token, _ in one.top] for one in done.logprobs] == [[t] for t in done.tokens]


def test_a_grammar_that_fails_ends_its_own_answer_alone() -> None:
    of = rig()
    # Its first steps are easy; then one explodes beyond llguidance's limits.
    grammar = Grammar("lark", 'start: /[a-d]{5}/ x\nx: "b"{1000000}')
    texts = prompts(30, 40, seed=5)
    alone = rig().answer("x", texts[1], 30)
    first = of.engine.submit("ann", texts[0], max_tokens=30, sampling=held(grammar))
    second = of.engine.submit("ben", texts[1], max_tokens=30)
    done = of.run()
    assert done[first].finish_reason == "error"
    assert "the grammar failed" in (done[first].error or "")
    assert done[second].tokens == alone.tokens
    of.check()


def test_a_bad_schema_is_refused_before_anything_changes() -> None:
    of = rig()
    with pytest.raises(InvalidRequestError, match="json schema: Invalid type: strng"):
        of.engine.submit("ann", [1], sampling=held(json_grammar({"type": "strng"})))
    assert not of.engine.has_work


def test_a_grammar_says_where_an_answer_ends() -> None:
    params = SamplingParams(grammar=json_grammar(PERSON), ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="ignore_eos cannot be combined with a grammar"):
        rig().engine.submit("ann", [1], sampling=params)


def test_a_model_without_a_tokenizer_holds_no_answer_to_a_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        Rig("llama").engine.submit("ann", [1], sampling=held(json_grammar(PERSON)))


def test_the_embedded_model_writes_json() -> None:
    backend, tokenizer = semantic.load()
    spec = backend.cache_spec()
    pool = semantic.BlockPool(spec, 100 * spec.n_layers)
    engine = semantic.BlockPoolBatchEngine(backend, tokenizer, pool, spec)
    for seed in range(4):
        sampling = held(json_grammar(PERSON), seed)
        engine.submit(f"a{seed}", "Describe a person.", None, 600, sampling=sampling)
    done = list(engine.step())
    assert len(done) == 4
    for one in done:
        check_person(one)


# Random schemas

NAMES = st.sampled_from(["a", "bc", "d e", "f"])
SCHEMAS = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 5)),
        st.builds(
            lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
            st.integers(-50, 50),
            st.integers(0, 100),
        ),
        st.builds(
            lambda values: {"enum": values},
            st.lists(st.sampled_from(["x", "yz", 1, 2.5, None, True]), min_size=1, max_size=3),
        ),
        st.just({"type": "string", "pattern": "^[a-c]{1,3}$"}),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda items, n: {"type": "array", "items": items, "maxItems": n},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda fields: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:2],
                "additionalProperties": False,
            },
            st.dictionaries(NAMES, inner, max_size=3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


def fits(value: object, schema: dict[str, object]) -> bool:
    """Whether `value` is what `schema` asks for: a validator of what SCHEMAS draws."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in cast("list[dict[str, object]]", schema["anyOf"]))
    if "enum" in schema:
        options = cast("list[object]", schema["enum"])
        return any(value == option and type(value) is type(option) for option in options)
    kind = cast(str, schema["type"])
    kinds = {"boolean": bool, "null": type(None), "string": str, "integer": int}
    kinds |= {"array": list, "object": dict}
    return type(value) is kinds[kind] and _fits_inside(value, schema)


def _fits_inside(value: object, schema: dict[str, object]) -> bool:
    if isinstance(value, str):
        pattern = cast(str, schema.get("pattern", ""))
        return len(value) <= cast(int, schema.get("maxLength", 99)) and bool(
            re.search(pattern, value)
        )
    if isinstance(value, list):
        items = cast("dict[str, object]", schema["items"])
        most = cast(int, schema["maxItems"])
        return len(value) <= most and all(fits(one, items) for one in value)
    if isinstance(value, dict):
        fields = cast("dict[str, dict[str, object]]", schema["properties"])
        required = cast("list[str]", schema["required"])
        known = set(required) <= set(value) <= set(fields)
        return known and all(fits(one, fields[name]) for name, one in value.items())
    if isinstance(value, int) and "minimum" in schema:
        return cast(int, schema["minimum"]) <= value <= cast(int, schema["maximum"])
    return True


@settings(
    max_examples=examples(6, thorough=200),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.lists(SCHEMAS, min_size=8, max_size=8), st.integers(0, 1000))
def test_random_schemas_are_always_met(schemas: list[dict[str, object]], seed: int) -> None:
    of = rig()
    uids = {
        of.engine.submit(
            f"a{i}", [i, seed % 90], max_tokens=250, sampling=held(json_grammar(schema), seed + i)
        ): schema
        for i, schema in enumerate(schemas)
    }
    ended = 0
    for uid, done in of.run().items():
        assert done.finish_reason in ("stop", "length"), done
        if done.finish_reason == "stop":
            ended += 1
            assert fits(json.loads(done.text), uids[uid]), (done.text, uids[uid])
    assert ended, "all were cut"


# The mask alone


def allowed(mask: GrammarMask, tokens: list[int], size: int) -> list[int]:
    logits = mask(mx.array(tokens, dtype=mx.int32), mx.zeros((1, size), mx.bfloat16))
    assert logits.dtype == mx.bfloat16
    return [i for i, value in enumerate(cast("list[float]", logits[0].tolist())) if value == 0]


def test_tokens_of_the_same_text_are_all_allowed_and_stepped_as_they_are() -> None:
    texts = text_tokenizer(["<0x41>", "AB", "BA", "BB", "AAB"], replacing=5)
    size = 100
    grammars = GrammarCompiler(texts.inner, texts.eos_token_ids, size)
    grammar = Grammar("lark", "start: /[AB]{6}C/")
    ends = sorted(texts.eos_token_ids)
    seen: set[int] = set()
    chooser = random.Random(1)
    for _ in range(60):
        mask = grammars.mask(grammar, 0)
        tokens: list[int] = []
        while (options := allowed(mask, tokens, size)) != ends:
            seen.update(options)
            tokens.append(chooser.choice(options))
        assert re.fullmatch("[AB]{6}C", texts.decode(tokens)), texts.decode(tokens)
    spelled = ["A", "B", "<0x41>", "AB", "BA", "BB", "AAB"]
    assert {id_of(texts, text) for text in spelled} <= seen


@pytest.mark.parametrize("size", [90, 96, 97, 128, 1000])
def test_a_model_with_more_or_fewer_tokens_than_its_tokenizer(size: int) -> None:
    texts = text_tokenizer()
    ends = {3} if size == 90 else texts.eos_token_ids
    grammars = GrammarCompiler(texts.inner, ends, size)
    any_text = Grammar("lark", "start: /(.|\\n)*/")
    options = allowed(grammars.mask(any_text, 0), [], size)
    assert set(range(90)) - {3} <= set(options)
    assert max(options) < 96
    free = allowed(grammars.mask(Grammar("lark", 'start: "a"', after="</t>"), 0), [], size)
    assert set(free) == set(range(min(size, 95))) - set(ends)


def test_a_language_of_tokens_that_the_model_lacks_fails_and_does_not_raise() -> None:
    texts = text_tokenizer()
    grammars = GrammarCompiler(texts.inner, {3}, 90)
    mask = grammars.mask(Grammar("lark", 'start: "}"'), 2)
    assert allowed(mask, [1, 2], 90) == [3]
    assert mask.failure_at(1) is None
    assert mask.failure_at(2) == "the grammar failed: none of the model's tokens can come next"


def test_a_mask_goes_on_where_the_answer_is() -> None:
    texts = text_tokenizer()
    grammars = GrammarCompiler(texts.inner, texts.eos_token_ids, 96)
    said = [*texts.encode('{"a": [1, 2]}'), 95]
    grammar = json_grammar({"type": "object"})
    stepped = grammars.mask(grammar, 2)
    for n in range(len(said) + 1):
        tokens = [7, 8, *said[:n]]
        assert allowed(stepped, tokens, 96) == allowed(grammars.mask(grammar, 2), tokens, 96)
    # One step is computed behind the end.
    assert allowed(stepped, [7, 8, *said, 95], 96) == [95]
    assert stepped.failure_at(99) is None


def test_no_token_runs_over_the_end_of_the_free_part() -> None:
    extra = [">{", "</t>", "</t>x", "x</t", "t>\n"]
    texts = text_tokenizer(extra, replacing=5)
    names = {text: id_of(texts, text) for text in [*extra, *"</t>x{}"]}
    grammars = GrammarCompiler(texts.inner, texts.eos_token_ids, 96)
    grammar = Grammar("lark", 'start: "{}"', after="</t>")

    def options(*said: str) -> set[int]:
        tokens = [names[one] for one in said]
        return set(allowed(grammars.mask(grammar, 0), tokens, 96))

    assert names["</t>x"] not in options()
    assert {names[">{"], names["</t>"], names["t>\n"]} <= options()
    assert names["t>\n"] not in options("<", "/")
    assert names[">{"] not in options("x</t")
    assert names[">"] in options("x</t")
    for begun in (["</t>"], ["x</t", ">"], ["<", "/", "t", ">"], ["<", "</t>"]):
        assert options(*begun) == {names["{"]}


# What is refused, and what it costs


def check(grammar: Grammar) -> None:
    texts = text_tokenizer()
    GrammarCompiler(texts.inner, texts.eos_token_ids, 96).check(grammar)


def chain(n: int, **more: object) -> dict[str, object]:
    inner = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": {**inner, f"d{n}": {"type": "string"}}, **more}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "json schema: not JSON"),
        ("[]", "json schema: schema must be an object or boolean"),
        ('{"a": NaN}', "json schema: NaN is not a number in JSON"),
        ('{}, "lark_grammar": "x"', "json schema: not JSON"),
        ("[" * 100_000, "json schema: nested too deeply"),
        ('{"items":' * 200 + "{}" + "}" * 200, "json schema: recursion limit exceeded"),
        ('{"type": "strng"}', "json schema: Invalid type: strng"),
        ('{"not": {}}', 'json schema: Unimplemented keys: \\["not"\\]'),
        ("false", "json schema: Unsatisfiable schema"),
        ('{"$ref": "#"}', "json schema: "),
        ('{"$ref": "file:///x.json"}', "json schema: .*does not fetch resources"),
        ('{"type": "string", "pattern": "(?=a)"}', "json schema: error: look-around"),
        ('{"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}', "too many expressions"),
        ('{"type": "integer", "multipleOf": 999999937}', "json schema: fuel exhausted"),
        ('"\\ud800"', "json schema: "),
        ("\ud800", "grammar: not valid Unicode"),
        (" " * (1 << 19), "grammar: expected at most 262144 characters"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        check(Grammar("json_schema", text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "lark: Empty grammar"),
        ("start: foo", "lark: at 1\\(8\\): unknown name"),
        ("start: " + "(" * 50_000, "lark: .*too deeply nested"),
        ('start: "a"{1000000}', "lark: .*Too many items"),
        ("start: A\nA: A", "lark: .*circular"),
    ],
)
def test_a_lark_grammar_that_cannot_be_enforced_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        check(Grammar("lark", text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("after", ["", "x" * 1000])
def test_a_text_before_the_language_has_a_length(after: str) -> None:
    with pytest.raises(InvalidRequestError, match="`after` must have 1 to 256 characters"):
        check(Grammar("lark", 'start: "a"', after))


@pytest.mark.process
def test_references_that_lead_on_and_on_do_not_overrun_the_stack() -> None:
    n = 4000
    answers: list[BaseException | None] = []

    def other_thread() -> None:
        try:
            check(json_grammar(chain(n)))
            rules = "\n".join(f"r{i}: r{i + 1}" for i in range(15_000))
            check(Grammar("lark", f'start: r0\n{rules}\nr15000: "x"'))
            answers.append(None)
        except BaseException as error:  # noqa: BLE001  told below, on the test's own thread
            answers.append(error)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert answers == [None]


def test_whitespace_comes_to_an_end() -> None:
    texts = text_tokenizer()
    mask = GrammarCompiler(texts.inner, texts.eos_token_ids, 96).mask(json_grammar(PERSON), 0)
    (space,) = texts.encode(" ")
    tokens = texts.encode("{")
    while space in allowed(mask, tokens, 96):
        tokens.append(space)
        assert len(tokens) < 100
    assert len(tokens) > 8
