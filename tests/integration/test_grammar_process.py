"""Expensive grammars end the process that checks them, and nothing else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import llguidance
import pytest

from semantic.adapters.mlx.sampling import grammar_child, grammar_compiler
from semantic.adapters.mlx.sampling.grammar_compiler import GrammarCompiler, is_cheap
from semantic.adapters.mlx.sampling.grammar_process import GrammarProcess, ProcessLimits
from semantic.adapters.mlx.text.chat_format import MLXChatFormat
from semantic.application.chat.call_grammar import answer_grammar
from semantic.application.chat.grammar_checks import Verdicts
from semantic.domain.chat import AnswerFormat, Chat, Message, Tool, ToolChoice
from semantic.domain.errors import CapacityError, InvalidRequestError, UncheckedGrammarError
from semantic.domain.grammar import Grammar
from tests.support.chat_templates import FORMATS, load_format
from tests.support.text_tokenizer import text_tokenizer

pytestmark = pytest.mark.process

MIB = 1 << 20


def integer(multiple: int) -> dict[str, object]:
    return {"type": "integer", "multipleOf": multiple}


def beside(n: int) -> dict[str, object]:
    """`n` branches, each of which repeats `n` properties."""
    names = [f"p{i}" for i in range(n)]
    branches: list[object] = [{"properties": {f"{name}x": {}}} for name in names]
    return {"type": "object", "properties": {name: {} for name in names}, "anyOf": branches}


def patterns(n: int) -> dict[str, object]:
    text = {"type": "string"}
    return {"type": "object", "patternProperties": {f"^.*a{i}.*b{i}$": text for i in range(n)}}


EXPENSIVE = {
    "one large multiple": integer(999_983),
    "a choice of multiples": {"anyOf": [integer(n) for n in (997, 1009, 1013, 1019)]},
    "all of several multiples": {"allOf": [integer(n) for n in (97, 101, 103)]},
    "patterns of names": patterns(300),
    "branches that repeat": beside(180),
    "empty branches": {"properties": {f"{i}": {} for i in range(120)}, "anyOf": [{}] * 240},
    "required names": {
        "required": [f"n{i}" for i in range(350)],
        "additionalProperties": {"properties": {f"p{i}": {} for i in range(350)}},
    },
}


def compiler() -> GrammarCompiler:
    texts = text_tokenizer()
    return GrammarCompiler(texts.inner, texts.eos_token_ids, 96)


def process(**limits: float) -> GrammarProcess:
    of = compiler()
    cpu_s, memory = limits.get("cpu_s", 60.0), limits.get("memory", 512 * MIB)
    return GrammarProcess(lambda: of.vocabulary, ProcessLimits(cpu_s, int(memory)))


@pytest.fixture(scope="module")
def quick() -> Iterator[GrammarProcess]:
    with closing(process(cpu_s=0.1)) as found:
        yield found


@pytest.fixture(scope="module")
def patient() -> Iterator[GrammarProcess]:
    with closing(process()) as found:
        yield found


def json_grammar(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@pytest.mark.parametrize("schema", EXPENSIVE.values(), ids=EXPENSIVE.keys())
def test_an_expensive_schema_is_refused_in_one_line(
    quick: GrammarProcess, schema: dict[str, object]
) -> None:
    problem = quick.problem(json_grammar(schema))
    assert problem.startswith("json schema: compiling it takes more than 0.1 s of CPU time; simpl")
    assert "\n" not in problem
    assert not is_cheap(json.dumps(schema))
    assert quick.problem(json_grammar({"type": "object"})) == ""


def test_memory_is_limited() -> None:
    with closing(process(memory=8 * MIB)) as probe:
        problem = probe.problem(json_grammar(integer(999_983)))
        assert problem.startswith("json schema: compiling it takes more than 8 MiB; simplify it")
        assert probe.problem(json_grammar(integer(7))) == ""


def test_large_grammars_leave_room_for_later_ones() -> None:
    large = json_grammar({"enum": [str(i) for i in range(10_000)]})
    with closing(process(memory=32 * MIB)) as probe:
        assert [probe.problem(one) for one in (large, json_grammar({})) * 3] == [""] * 6


@pytest.mark.parametrize(
    "text",
    [
        "{", "false", '{"type": "strng"}', '{"not": {}}', '{"type": "string", "pattern": "(?=a)"}',
        '{"type": "integer", "multipleOf": 999999937}', '{"type": "string", "format": "uri"}',
        '{"type": "integer", "multipleOf": 7}',
    ],
)  # fmt: skip
def test_the_process_finds_what_the_server_finds(patient: GrammarProcess, text: str) -> None:
    grammar = Grammar("json_schema", text)
    found = ""
    try:
        compiler().check(grammar)
    except InvalidRequestError as error:
        found = str(error)
    assert patient.problem(grammar) == found


def test_marks_of_calls_are_the_same_tokens_in_the_process(tmp_path: Path) -> None:
    texts = load_format(FORMATS["json_tools"], tmp_path)
    of = GrammarCompiler(texts.inner, texts.eos_token_ids, 2054)
    tool = Tool("f", "", {"type": "object", "properties": {"n": integer(7)}})
    chat = Chat((Message("user", "x"),), tools=(tool,), tool_choice=ToolChoice("required"))
    grammar = MLXChatFormat(texts).call_grammar(chat, opens_thought=False)
    assert grammar is not None
    assert "<[" in grammar.text
    of.check(grammar)
    with closing(GrammarProcess(lambda: of.vocabulary)) as probe:
        assert probe.problem(grammar) == ""


FAILS = """
from pathlib import Path

names = {{"__name__": "child"}}
exec(Path({real!r}).read_text(), names)
failed, problem = Path({failed!r}), names["_problem"]

def fails(*given):
    if {always} or not failed.exists():
        failed.touch()
        raise RuntimeError("cannot start a thread")
    return problem(*given)

names["_problem"] = fails
names["_main"]()
"""
"""A process that fails for no grammar's fault, once or always."""


@pytest.mark.parametrize("always", [False, True])
def test_a_process_that_fails_by_itself_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    failed, script, real = tmp_path / "failed", tmp_path / "child.py", str(grammar_child.__file__)
    script.write_text(FAILS.format(real=real, failed=str(failed), always=always))
    monkeypatch.setattr(grammar_child, "__file__", str(script))
    with closing(process()) as probe:
        if always:
            ends = r"ended: status 1, RuntimeError: cannot start a thread; retry"
            with pytest.raises(CapacityError, match=ends):
                probe.problem(json_grammar({}))
        else:
            assert probe.problem(json_grammar({})) == ""
    assert failed.exists()


def test_threads_that_start_on_a_deep_stack_have_none() -> None:
    assert grammar_child.on_deep_stack(threading.stack_size) == threading.stack_size()


def test_a_process_that_compiles_can_be_ended() -> None:
    found: list[str] = []

    def compile_it() -> None:
        try:
            found.append(probe.problem(json_grammar(EXPENSIVE["a choice of multiples"])))
        except CapacityError as error:
            found.append(str(error))

    with closing(process()) as probe:
        assert probe.problem(json_grammar({})) == ""
        first = probe.pid
        thread = threading.Thread(target=compile_it)
        thread.start()
        while thread.is_alive():  # it may be stopped before it begins
            probe.stop()
            time.sleep(0.01)
        assert found[0].startswith("the process that compiles grammars")
        assert probe.problem(json_grammar({})) == ""
        assert probe.pid != first
    assert probe.pid is None


def test_the_process_inherits_nothing_and_ends_with_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMANTIC_API_KEY", "secret")
    with closing(process()) as probe, (tmp_path / "lock").open("w") as held:
        held.write("")
        assert probe.problem(json_grammar({})) == ""
        folder = Path("/proc", str(probe.pid))
        if not folder.exists():
            pytest.skip("this system does not show what a process has")
        assert b"secret" not in (folder / "environ").read_bytes()
        own = str(folder / "statm")  # read now and then: its own memory
        assert {fd for fd, path in open_files(folder) if path != own} == {"0", "1", "2"}
        maps = (folder / "maps").read_text()
        assert "llguidance" in maps
        assert "mlx" not in maps
    assert not folder.exists()


def open_files(folder: Path) -> Iterator[tuple[str, str]]:
    """The descriptors of a process and their files; one that it closes meanwhile is left out."""
    for link in (folder / "fd").iterdir():
        with suppress(FileNotFoundError):
            yield link.name, str(link.readlink())


# Which grammars are checked


def test_a_grammar_of_a_clients_is_never_cheap(quick: GrammarProcess) -> None:
    repeated = "\n".join(f"r{i}: r{i + 1} r{i + 1}?" for i in range(20))
    for text in ('start: "a"', f"start: r0\n{repeated}\nr20: /(a|b)*a(a|b){{12}}/"):
        grammar = answer_grammar(AnswerFormat(grammar=text))
        assert not is_cheap(grammar.text)
        assert "\n" not in quick.problem(grammar)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"name": {"type": "string"}, "age": {"minimum": 0}}},
        {"type": ["string", "null"], "maxLength": 10**9},
        {"type": "array", "items": {"enum": ["a", "é"]}, "minItems": 10**6},
    ],
)
def test_a_common_schema_is_cheap(schema: dict[str, object]) -> None:
    assert is_cheap(json.dumps(schema))


@pytest.mark.parametrize(
    "text",
    [
        *(json.dumps(schema) for schema in EXPENSIVE.values()),
        '{"type": "integer", "m\\u0075ltipleOf": 999983}',
        '{"$ref": "#/$defs/a", "$defs": {"a": {}}}',
        '{"type": "object", "x-guidance": {"whitespace_pattern": "(a|b)*"}}',
        json.dumps({"enum": ["x" * 9000]}),
    ],
)
def test_whatever_may_be_expensive_is_checked_before(text: str) -> None:
    of, verdicts, grammar = compiler(), Verdicts(), Grammar("json_schema", text)
    of.guard(verdicts)
    for attempt in (of.check, lambda one: of.schema_error(one.text)):
        with pytest.raises(UncheckedGrammarError) as caught:
            attempt(grammar)
        assert caught.value.grammars == (grammar,)
    verdicts.remember(grammar, "too expensive")
    assert of.schema_error(text) == "too expensive"
    with pytest.raises(InvalidRequestError, match="too expensive"):
        of.check(grammar)


def test_what_was_accepted_is_compiled_before_it_is_needed() -> None:
    of, verdicts, grammar = compiler(), Verdicts(), json_grammar(integer(7))
    of.guard(verdicts)
    verdicts.remember(grammar, "")
    assert of.schema_error(grammar.text) == ""
    with pytest.raises(UncheckedGrammarError):
        of.mask(grammar, 0)
    of.compile(grammar)
    of.mask(grammar, 0)


@pytest.mark.parametrize("text", [json.dumps({"type": "integer"}), json.dumps(integer(7))])
def test_what_a_tenant_compiled_makes_nothing_quicker_for_another(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    started = grammar_child.start

    def counted(trie: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
        compiled.append(source)
        return started(trie, source)

    monkeypatch.setattr(grammar_compiler, "start", counted)
    of = compiler()
    a, b = (Grammar("json_schema", text, tenant=tenant) for tenant in "ab")
    for grammar in (a, a, b):
        of.check(grammar)
    assert len(compiled) == 2


def test_a_verdict_on_a_tenants_schema_is_not_known_to_another() -> None:
    of, verdicts, text = compiler(), Verdicts(), json.dumps(integer(7))
    of.guard(verdicts)
    verdicts.remember(Grammar("json_schema", text, tenant="a"), "")
    assert of.schema_error(text, "a") == ""
    of.require_checked([text], "a")
    for attempt in (lambda: of.schema_error(text, "b"), lambda: of.require_checked([text], "b")):
        with pytest.raises(UncheckedGrammarError) as caught:
            attempt()
        assert [one.tenant for one in caught.value.grammars] == ["b"]
