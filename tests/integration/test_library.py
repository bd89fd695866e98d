"""`semantic.Engine` and `semantic.AsyncEngine` with the model inside the package."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import pytest
from mlx_lm import generate
from mlx_lm.tokenizer_utils import TokenizerWrapper

import semantic
from semantic.adapters.mlx.backend import MLXBackend
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import AnswerEnd, AnswerStarted, PromptProgress, TextDelta
from semantic.domain.errors import (
    AgentNotFoundError,
    BackendError,
    ContextOverflowError,
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
    SemanticError,
)
from semantic.domain.match import MatchEnd
from semantic.library.chat_options import ChatOptions, Messages

pytestmark = pytest.mark.process

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[semantic.Engine]:
    with semantic.Engine(Settings(pool_blocks=400), max_context=2048) as loaded:
        yield loaded


# Conversations


def test_answers_are_those_of_plain_mlx_lm_for_the_whole_conversation(
    engine: semantic.Engine,
) -> None:
    model, tokenizer = semantic.load()
    inner = cast(TokenizerWrapper, tokenizer.inner)
    ada = engine.agent("ada", system="The user lives in Oslo.")
    cached = []
    for text in ("My name is Ada.", "What is my name?", "Where do I live?"):
        asked = [*ada.history(), semantic.Message("user", text)]
        answer = ada.chat(text, max_tokens=40)
        prompt = tokenizer.render_chat([{"role": m.role, "content": m.content} for m in asked])
        assert answer.text == generate(model.model, inner, prompt, max_tokens=40)
        assert answer.prompt_tokens == len(prompt)
        assert ada.history() == (*asked, answer.message)
        cached.append(answer.cached_tokens)
    assert 0 == cached[0] < cached[1] < cached[2]
    assert ada.cached_tokens >= cached[2]


def test_messages_replace_the_conversation(engine: semantic.Engine) -> None:
    agent = engine.agent("replaced")
    agent.chat("My name is Kai.")
    told: list[semantic.Message | dict[str, object]] = [
        {"role": "user", "content": "My name is Zoe."},
        semantic.Message("assistant", "Hello!"),
        {"role": "user", "content": "What is my name?"},
    ]
    answer = agent.chat(told)
    assert answer.text == str(answer) == "Your name is Zoe."
    assert [one.content for one in agent.history()[:2]] == ["My name is Zoe.", "Hello!"]
    assert agent.chat("What is my name?").cached_tokens > 20


def test_a_stream_has_the_text_of_the_whole_answer(engine: semantic.Engine) -> None:
    text = "Count from 3 to 7."
    with engine.chat("streamed", text, stream=True) as stream:
        with pytest.raises(BackendError, match="has not finished"):
            _ = stream.answer
        pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == stream.answer.text == engine.chat("whole", text).text
    events = list(engine.chat("streamed", text, stream=True).events())
    assert isinstance(events[0], AnswerStarted)
    assert isinstance(events[-1], AnswerEnd)
    assert {PromptProgress, TextDelta} <= {type(event) for event in events}


def test_a_closed_stream_is_cancelled_and_its_text_stays(engine: semantic.Engine) -> None:
    agent = engine.agent("closed")
    with agent.chat("Count from 1 to 99.", stream=True) as stream:
        pieces = iter(stream)
        begun = next(pieces) + next(pieces)
        with pytest.raises(InvalidRequestError, match="'closed' is answering"):
            agent.chat("Hello!")
        with pytest.raises(InvalidRequestError, match="'closed' is answering"):
            agent.forget()
        assert agent.chat("What is 3 plus 4?", keep=False).text == "3 plus 4 is 7."
    assert agent.history()[-1].content.startswith(begun)
    assert agent.chat("What is 3 plus 4?").text == "3 plus 4 is 7."
    agent.chat("Hello!", stream=True).close()
    assert len(agent.history()) == 4


def test_a_stream_that_is_dropped_is_cancelled(engine: semantic.Engine) -> None:
    agent = engine.agent("dropped")
    for text in agent.chat("Count from 1 to 99.", stream=True):
        begun = text
        break
    assert agent.chat("What is 3 plus 4?").text == "3 plus 4 is 7."
    assert agent.history()[1].content.startswith(begun)


def test_what_is_dropped_in_the_thread_of_the_loop_is_closed_there(engine: semantic.Engine) -> None:
    """The interpreter may collect garbage in any thread."""
    begun = iter(engine.chat("collected", "Count from 1 to 99.", stream=True))
    held = [begun]
    next(begun)
    del begun
    engine._loop.run(_drop(held))
    assert engine.chat("collected", "What is 3 plus 4?").text == "3 plus 4 is 7."


async def _drop(held: list[Iterator[str]]) -> None:
    held.clear()


def test_the_handler_of_a_signal_may_cancel_an_answer_at_any_moment(
    engine: semantic.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = engine.agent("interrupted").chat("Count from 1 to 99.", stream=True)
    texts = iter(stream)
    next(texts)
    begin = asyncio.run_coroutine_threadsafe

    def interrupted(
        work: Coroutine[object, object, object], loop: asyncio.AbstractEventLoop
    ) -> Future[object]:
        monkeypatch.undo()
        stream.cancel()  # in the thread that begins this work
        return begin(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    reads = threading.Thread(target=lambda: list(texts), daemon=True)
    reads.start()
    reads.join(60)
    assert not reads.is_alive(), "it waits for itself"
    assert stream.answer.finish_reason == "cancelled"


def test_a_cancelled_answer_ends_with_what_it_has(engine: semantic.Engine) -> None:
    agent = engine.agent("cancelled")
    stream = agent.chat("Count from 1 to 99.", stream=True)
    begun = ""
    for text in stream:
        begun += text
        stream.cancel()
    assert stream.answer.finish_reason == "cancelled"
    assert agent.history()[-1].content == stream.answer.text == begun
    assert "99" not in begun


def test_what_is_not_kept_leaves_the_agent_as_it_was(engine: semantic.Engine) -> None:
    agent = engine.agent("kept")
    agent.chat("My name is Kai.")
    before = agent.history(), agent.cached_tokens
    assert agent.chat("What is my name?", keep=False).text == "Your name is Kai."
    assert (agent.history(), agent.cached_tokens) == before


def test_options_reach_the_answer(engine: semantic.Engine) -> None:
    fixed: ChatOptions = {"temperature": 5.0, "seed": 3, "max_tokens": 12, "keep": False}
    first, again = (engine.chat("hot", "Go on.", **fixed) for _ in range(2))
    assert first.text == again.text
    assert first.finish_reason == "length"
    assert first.text != engine.chat("hot", "Go on.", keep=False, max_tokens=12).text
    cut = engine.chat("cut", "Count from 3 to 7.", stop=["6"])
    assert (cut.text, cut.stop_string) == ("3, 4, 5, ", "6")
    formed = engine.chat("formed", "I live in Oslo.", schema=SCHEMA, max_tokens=600)
    assert json.loads(formed.text)["city"] in ("Oslo", "Rome")
    whole = semantic.SamplingParams(temperature=5.0, seed=3)
    assert (
        engine.chat("hot", "Go on.", keep=False, max_tokens=12, sampling=whole).text == first.text
    )


def test_a_tool_is_called_and_its_result_continues_the_conversation(
    engine: semantic.Engine,
) -> None:
    tool = semantic.Tool("weather", "Weather of a city", SCHEMA, strict=True)
    agent = engine.agent("caller")
    options: ChatOptions = {"tools": [tool], "max_tokens": 300, "parallel_tool_calls": False}
    must: ChatOptions = {**options, "tool_choice": semantic.ToolChoice("required")}
    answer = agent.chat("What is the weather?", **must)
    (call,) = answer.tool_calls
    assert (answer.finish_reason, call.name, answer.text) == ("tool_calls", "weather", "")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    result = semantic.Message("tool", "sunny", tool_call_id=call.id)
    again = agent.chat([*agent.history(), result], **options)
    assert again.cached_tokens > answer.prompt_tokens  # the call as well
    assert [one.role for one in agent.history()] == ["user", "assistant", "tool", "assistant"]


def test_a_batch_is_answered_in_its_order(engine: semantic.Engine) -> None:
    asked: list[tuple[str, Messages] | semantic.Request] = [
        (f"batch-{x}", f"What is {x} plus 4?") for x in range(3, 8)
    ]
    asked.append(semantic.Request("batch-short", "Count from 1 to 9.", {"max_tokens": 3}))
    answers = engine.run_batch(asked, max_tokens=20)
    assert [one.text for one in answers[:5]] == [f"{x} plus 4 is {x + 4}." for x in range(3, 8)]
    assert (answers[5].agent, answers[5].usage.completion) == ("batch-short", 3)
    assert engine.run_batch([]) == []
    known = {one.id: one for one in engine.agents()}
    with pytest.raises(InvalidRequestError, match="'b' has two requests in one batch"):
        engine.run_batch([("a", "Hello!"), ("b", "Hello!"), ("b", "Hello!")])
    with pytest.raises(InvalidRequestError, match="expected a string or a list"):
        engine.run_batch([("batch-3", "What is my name?"), ("b", "")])
    assert len(engine.agent("batch-3").history()) == 4  # the others have ended
    assert {one.id for one in engine.agents()} == known.keys()


def test_any_thread_may_ask(engine: semantic.Engine) -> None:
    said: dict[int, str] = {}

    def ask(x: int) -> None:
        said[x] = engine.chat(f"thread-{x}", f"What is {x} plus 4?").text

    threads = [threading.Thread(target=ask, args=(x,)) for x in range(3, 7)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert said == {x: f"{x} plus 4 is {x + 4}." for x in range(3, 7)}


# Agents and their caches


def test_a_fork_begins_with_the_conversation_and_goes_its_own_way(engine: semantic.Engine) -> None:
    kai = engine.agent("kai", system="Be brief.")
    with pytest.raises(AgentNotFoundError, match="there is no agent 'kai'"):
        kai.fork("kai-2")
    kai.chat("My name is Kai.")
    twin = kai.fork("kai-2")
    assert twin.history() == kai.history()
    answer = twin.chat("What is my name?")
    assert answer.text == "Your name is Kai."
    assert answer.cached_tokens >= kai.cached_tokens - 1
    assert len(kai.history()) == 3
    assert twin.info().summary.parent == "kai"
    with pytest.raises(InvalidRequestError, match="agent 'kai-2' already exists"):
        kai.fork("kai-2")


def test_a_conversation_goes_back_to_a_checkpoint_or_a_turn(engine: semantic.Engine) -> None:
    agent = engine.agent("mara", system="Be brief.")
    agent.chat("My name is Mara.")
    first = agent.history()
    assert agent.checkpoint("named").tokens == agent.info().summary.tokens
    agent.chat("My name is Zoe.")
    agent.chat("What is my name?")
    turns = agent.checkpoints().turns
    assert len(turns) == 3
    early = agent.fork("mara-early", turn=1)
    assert early.history() == first
    assert early.info().summary.tokens == turns[0].tokens
    assert early.chat("What is my name?").text == "Your name is Mara."
    also = agent.fork("mara-also", checkpoint="named")
    found = agent.diff(also)
    assert (found.common_tokens, found.got) == (turns[0].tokens, None)
    agent.restore("named")
    assert agent.history() == first
    answer = agent.chat("What is my name?")
    assert answer.text == "Your name is Mara."
    assert answer.cached_tokens >= turns[0].tokens - 1
    with pytest.raises(AgentNotFoundError, match="has no checkpoint 'other'; it has 'named'"):
        agent.restore("other")
    agent.delete_checkpoint("named")
    assert agent.checkpoints().saved == ()


def test_why_names_what_changed(engine: semantic.Engine) -> None:
    agent = engine.agent("asked")
    assert agent.cached_tokens == 0
    agent.chat("My name is Kai.")
    assert agent.why().startswith("asked's last prompt: 8 tokens, ")
    agent.set_system("Speak of bridges.")
    answer = agent.chat("What is my name?")
    assert answer.why == "The system message was added."
    assert agent.why().endswith("The system message was added.")
    assert "At position 0 the agent had token" in agent.why()
    agent.set_system(None)
    assert agent.history()[0].role == "user"


def test_a_system_message_is_for_the_beginning(engine: semantic.Engine) -> None:
    agent = engine.agent("begun", system="The user's name is Zoe.")
    assert agent.chat("What is my name?").text == "Your name is Zoe."
    assert engine.agent("begun", system="The user's name is Zoe.").history() == agent.history()
    with pytest.raises(InvalidRequestError, match="began with another system message"):
        engine.agent("begun", system="Be brief.")
    agent.forget()
    assert [one.content for one in agent.history()] == ["The user's name is Zoe."]


def test_pin_and_forget(engine: semantic.Engine) -> None:
    agent = engine.agent("pinned")
    agent.forget()
    agent.chat("Hello!")
    agent.pin()
    assert agent.info().summary.pinned
    agent.pin(pinned=False)
    assert not agent.info().summary.pinned
    agent.forget()
    assert (agent.history(), agent.cached_tokens) == ((), 0)
    with pytest.raises(AgentNotFoundError):
        agent.info()


def is_reused(answer: semantic.Answer) -> bool:
    """Whether its prompt was read from the store, or could have been: a busy machine may have
    measured that computing so few tokens takes less time."""
    match = answer.usage.match
    return answer.cached_tokens > 10 or (match is not None and match.end is MatchEnd.SLOWER)


def test_an_agent_goes_on_in_another_engine_and_in_another_place(
    tmp_path: Path, engine: semantic.Engine
) -> None:
    file = tmp_path / "kai.tar"
    with semantic.Engine(store=tmp_path / "store") as first:
        first.chat("kai", [{"role": "system", "content": "Be brief."},
                           {"role": "user", "content": "My name is Kai."}])  # fmt: skip
        first.agent("kai").fork("twin")
        assert first.agent("kai").export(file) == file.stat().st_size
        assert file.stat().st_mode & 0o077 == 0
    with semantic.Engine(store=tmp_path / "store") as second:
        for name in ("kai", "twin"):
            agent = second.agent(name)
            answer = agent.chat("What is my name?")
            assert answer.text == "Your name is Kai."
            assert is_reused(answer)
            assert [one.role for one in agent.history()[:3]] == ["system", "user", "assistant"]
        second.agent("moved", system="Be long.")
        moved = second.import_agent(file, "moved")
        with pytest.raises(InvalidRequestError, match="began with another system message"):
            moved.history()
        assert {one.name for one in tmp_path.iterdir()} == {"kai.tar", "store"}
    moved = engine.import_agent(str(file), "moved-kai")
    answer = moved.chat("What is my name?")
    assert answer.text == "Your name is Kai."
    assert is_reused(answer)
    with pytest.raises(InvalidRequestError, match="agent 'moved-kai' already exists"):
        engine.import_agent(file, "moved-kai")


def test_an_agent_of_a_server_is_saved_without_its_messages(
    engine: semantic.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semantic.library.async_agent.transcript_of", lambda _: "")
    engine.chat("remote", "My name is Kai.")
    del engine._engine._agents[0]["remote"]
    with pytest.raises(InvalidRequestError, match="'remote' is saved without its messages"):
        engine.chat("remote", "What is my name?")
    told = [{"role": "user", "content": "My name is Kai."}]
    assert engine.chat("remote", told).cached_tokens > 5


# Errors


@pytest.mark.parametrize(
    ("messages", "options", "words"),
    [
        ("", {}, "expected a string or a list of messages, got ''"),
        ([], {}, "expected a string or a list of messages"),
        (7, {}, "expected a string or a list of messages, got 7"),
        ([{"role": "user"}], {}, 'expected a Message or an object with "role" and "content"'),
        ("a", {"done": 1}, "done must be True or False, got 1"),
        ("a", {"back_in": "5"}, "back_in must be a number of seconds, got '5'"),
        ("a", {"back_in": 1, "done": True}, "back_in must not be given for a finished agent"),
        ("a", {"priority": 0.5}, "priority must be an integer, got 0.5"),
        ("a", {"priority": 9}, "priority: expected -8 to 8, got 9"),
        ("a", {"size": 1}, "unknown option 'size'; expected one of max_tokens, "),
        ("a", {"temperature": -1.0}, "temperature must be 0 or more"),
        ("a", {"stop": "b"}, "stop must be a list of strings, got 'b'"),
        ("a", {"tools": ["b"]}, "tools must be a list of semantic.Tool"),
        ("a", {"max_tokens": 0}, "max_tokens must be at least 1"),
        (
            "a",
            {"sampling": semantic.SamplingParams(), "seed": 1},
            "expected either sampling or seed",
        ),
        ("a", {"schema": {"type": "no"}}, "cannot enforce the answer's format"),
    ],
)
def test_wrong_input_says_what_was_expected_and_changes_nothing(
    engine: semantic.Engine, messages: object, options: Mapping[str, object], words: str
) -> None:
    agent = engine.agent("wrong")
    asked, given = cast(Messages, messages), cast(ChatOptions, options)
    with pytest.raises(InvalidRequestError, match=words) as raised:
        agent.chat(asked, **given)
    assert "\n" not in str(raised.value)
    with pytest.raises(InvalidRequestError, match=words):
        agent.chat(asked, stream=True, **given)
    assert agent.history() == ()
    with pytest.raises(AgentNotFoundError):
        agent.info()


def test_tokens_and_tiers_are_counted(engine: semantic.Engine) -> None:
    answer = engine.chat("counted", "What is 3 plus 4?")
    assert engine.count_tokens("What is 3 plus 4?") == answer.prompt_tokens
    assert engine.count_tokens([{"role": "system", "content": "a"}, answer.message]) > 2
    with pytest.raises(InvalidRequestError, match="expected a string or a list of messages"):
        engine.count_tokens([])
    (memory,) = engine.stores()
    assert memory.n_agents >= 1


def test_more_than_the_context_is_refused(engine: semantic.Engine) -> None:
    with pytest.raises(ContextOverflowError, match="this model's context is 2048 tokens"):
        engine.chat("long", "My name is Ada. " * 1000)
    assert engine.agent("long").history() == ()


def test_a_model_that_fails_leaves_the_conversation_as_it_was(
    engine: semantic.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = engine.agent("unlucky")
    agent.chat("My name is Kai.")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as failing:
        failing.setattr(MLXBackend, "prefill", broken)
        with pytest.raises(BackendError, match="device lost"):
            agent.chat("What is my name?")
        with pytest.raises(BackendError, match="device lost"):
            list(agent.chat("What is my name?", stream=True))
    assert len(agent.history()) == 2
    assert agent.chat("What is my name?").text == "Your name is Kai."


def test_an_export_that_cannot_be_written_leaves_nothing(
    engine: semantic.Engine, tmp_path: Path
) -> None:
    engine.chat("exported", "Hello!")
    with pytest.raises(OperatorError, match=r"cannot write .*: No such file or directory"):
        engine.agent("exported").export(tmp_path / "no" / "file")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OperatorError, match="cannot write"):
        engine.agent("exported").export(tmp_path / "folder")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "file").write_bytes(b"no archive" * 100)
    with pytest.raises(InvalidRequestError, match=r"cannot read the tar header of agent\.json"):
        engine.import_agent(tmp_path / "file")
    with pytest.raises(InvalidRequestError, match=r"cannot read .*: No such file"):
        engine.import_agent(tmp_path / "none")


def test_an_engine_that_cannot_be_loaded_leaves_no_loop(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ModelNotFoundError, match="no model folder 'nowhere'"):
        semantic.Engine("nowhere")
    with pytest.raises(InvalidRequestError, match="expected Settings or a store, got both"):
        semantic.Engine(Settings(), store=tmp_path)
    begun = set(threading.enumerate()) - before
    for one in begun:
        one.join(0 if one.name == "engine" else 60)
    # An engine's thread waits for the end of the process: see `EngineThread`.
    assert {one.name for one in begun if one.is_alive()} <= {"engine"}


def test_a_closed_engine_refuses() -> None:
    engine = semantic.Engine(Settings(pool_blocks=40))
    agent = engine.agent("ada")
    stream = agent.chat("Count from 1 to 99.", stream=True)
    engine.close()
    engine.close()
    for ask in (lambda: agent.chat("Hello!"), lambda: engine.chat("ada", "Hello!")):
        with pytest.raises(BackendError, match=r"the engine is (closed|not loaded)"):
            ask()  # type: ignore[no-untyped-call]
    stream.close()


def test_threads_may_close_an_engine_together_while_another_one_asks() -> None:
    engine = semantic.Engine(Settings(pool_blocks=40))
    ended: list[BaseException | None] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except SemanticError as error:
            ended.append(error)
        else:
            ended.append(None)

    begun = iter(engine.chat("ada", "Count from 1 to 99.", stream=True))
    next(begun)
    asked = [lambda: engine.chat("bob", "Count from 1 to 99."), lambda: list(begun)]
    works: list[Callable[[], object]] = [*asked, *[engine.close] * 3]
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == len(threads), "a thread waits for ever, or has another error"
    assert ended.count(None) >= 3


def test_a_program_that_closes_nothing_ends(tmp_path: Path) -> None:
    code = (
        "import semantic, sys; engine = semantic.Engine(store=sys.argv[1]); "
        "print(engine.chat('kai', 'My name is Kai.'))"
    )
    words = (sys.executable, "-c", code, str(tmp_path))
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Nice to meet you, Kai.\n", "")
    with semantic.Engine(store=tmp_path) as again:
        assert again.chat("kai", "What is my name?").text == "Your name is Kai."


# On an event loop


def test_an_engine_that_is_started_twice_at_once_is_loaded_once() -> None:
    def engines() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if one.name == "engine"}

    async def start() -> None:
        engine = semantic.AsyncEngine(Settings(pool_blocks=40))
        before = engines()
        starts = [asyncio.create_task(engine.start()) for _ in range(2)]
        await asyncio.sleep(0)
        await engine.close()
        await asyncio.gather(*starts)
        assert not engine.is_loaded
        assert len(engines() - before) == 1

    asyncio.run(start())


def test_tasks_of_one_loop_ask_together() -> None:
    async def converse() -> None:
        async with semantic.AsyncEngine(Settings(pool_blocks=200)) as engine:
            asked = [engine.chat(f"a{x}", f"What is {x} plus 4?") for x in range(3, 6)]
            said = [answer.text for answer in await asyncio.gather(*asked)]
            assert said == [f"{x} plus 4 is {x + 4}." for x in range(3, 6)]
            stream = await engine.chat("a3", "Count from 3 to 5.", stream=True)
            assert "".join([text async for text in stream]) == "3, 4, 5."
            twin = await engine.agent("a3").fork("twin")
            assert await twin.history() == await engine.agent("a3").history()
            assert await twin.cached_tokens() > 10
            async with await twin.chat("Count from 1 to 99.", stream=True) as begun:
                assert await anext(aiter(begun)) == "1"
            waiting = asyncio.create_task(engine.chat("a4", "Count from 1 to 99."))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await engine.run_batch([("a4", "What is 3 plus 4?")]))[
                0
            ].text == "3 plus 4 is 7."
        with pytest.raises(BackendError, match="not loaded"):
            await engine.chat("a3", "Hello!")

    asyncio.run(converse())


def public(kind: type) -> dict[str, Callable[..., object]]:
    """The public methods and properties of a class."""
    members = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    return {
        name: cast(Callable[..., object], value.fget if isinstance(value, property) else value)
        for name, value in members.items()
    }


@pytest.mark.parametrize(
    ("sync", "twin", "only"),
    [
        (semantic.Engine, semantic.AsyncEngine, {"start", "is_loaded"}),
        (semantic.Agent, semantic.AsyncAgent, {"begin"}),
        (semantic.AnswerStream, semantic.AsyncAnswerStream, set()),
    ],
)
def test_twins_have_the_same_methods(sync: type, twin: type, only: set[str]) -> None:
    one, other = public(sync), public(twin)
    assert f"`{sync.__name__}`" in (twin.__doc__ or ""), "its methods are described there"
    assert other.keys() - one.keys() == only
    assert one.keys() - other.keys() <= {"name"}
    for name in one.keys() & other.keys():
        assert inspect.getdoc(one[name]), name
        given, expected = (
            inspect.signature(found).parameters for found in (one[name], other[name])
        )
        assert list(given) == list(expected), name


def test_both_engines_are_made_of_the_same() -> None:
    assert inspect.signature(semantic.Engine) == inspect.signature(semantic.AsyncEngine)
