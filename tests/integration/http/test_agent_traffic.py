"""Coding agents' traffic over HTTP, on each of their wires: real models, noise, restarts, forgery.

From the second turn on nearly all of every prompt is cached, nothing is said to be lost that was
not, and every answer is the one that the same tokens get without a cache.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pydantic import SecretStr

from semantic.application.chat.answer_reader import AnswerMessage
from semantic.composition.engine_settings import Settings
from semantic.domain.answer import (
    AnswerEnd,
    AnswerEvent,
    AnswerStarted,
    PromptProgress,
    PromptScored,
    TextDelta,
)
from semantic.domain.chat import Message
from semantic.domain.value_objects import BLOCK_TOKENS, SamplingParams
from semantic.ports.serving import Ask, Prompt, ServedModel, ServingPort
from semantic.serve import ServeSettings, load_serving
from semantic_server.http.answer_records import AnswerRecord
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.settings import ServerSettings
from tests.support.agent_clients import (
    WIRES,
    AgentClient,
    Json,
    MessagesAgent,
    TurnResult,
    require_cached,
    words,
)
from tests.support.http_server import RunningServer, running
from tests.support.lanes import examples
from tests.support.model_folder import write_model

pytestmark = pytest.mark.process

CHECKED = 2
"""Answers of a server that are computed again without a cache: its last ones."""
EMBEDDED = "semantic-tiny"
SECRET = "swordfish"  # a word of a prompt that must not be shown
KEYS = SecretStr("key-of-a" * 4), SecretStr("key-of-b" * 4)

MARKS = ("<think>", "</think>", "<tool_call>")
"""What an answer that was cut may end in the midst of: that is not told."""

every_wire = pytest.mark.parametrize("wire", WIRES)


@dataclass(frozen=True)
class Answered:
    """What was answered, and in which tokens it was asked."""

    prompt: tuple[int, ...]
    said: Message
    max_tokens: int | None


@dataclass
class Witness:
    """A `ServingPort` that remembers in which tokens each answer was asked for."""

    serving: ServingPort
    answers: list[Answered] = field(default_factory=list)

    @property
    def model(self) -> ServedModel:
        return self.serving.model

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerEvent, None]:
        prompt = await self.serving.tokenize(ask.prompt, tenant=ask.tenant)
        said = AnswerMessage()
        async with aclosing(self.serving.answer(ask)) as events:
            async for event in events:
                match event:
                    case AnswerEnd():
                        assert event.usage.prompt == len(prompt)
                        self.answers.append(Answered(prompt, said.message, ask.max_tokens))
                    case AnswerStarted() | PromptProgress() | PromptScored():
                        pass
                    case _:
                        said.add(event)
                yield event

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        return await self.serving.tokenize(
            prompt, add_special_tokens=add_special_tokens, tenant=tenant
        )

    async def detokenize(self, tokens: Sequence[int], tenant: str = "") -> str:
        return await self.serving.detokenize(tokens, tenant)

    async def token_texts(self, tokens: Sequence[int], tenant: str = "") -> tuple[str, ...]:
        return await self.serving.token_texts(tokens, tenant)


@dataclass
class Halfway:
    """An observer that says when a third of a prompt was computed, of the next request alone."""

    reached: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    uid: str | None = None
    done: int = 0

    def accepted(self, uid: str, agent: str, prompt_tokens: int) -> None:
        """See `Observer.accepted`."""
        del agent, prompt_tokens
        self.uid = self.uid or uid

    def prefilled(self, uid: str, done: int, total: int) -> None:
        """See `Observer.prefilled`."""
        if uid != self.uid:
            return
        self.done = done
        if done >= 0.3 * total:
            self.reached.set()

    def first_token(self, uid: str) -> None:
        """See `Observer.first_token`."""

    def finished(self, uid: str | None, record: AnswerRecord) -> None:
        """See `Observer.finished`."""
        del record
        if uid is not None and uid == self.uid:
            self.left.set()


@dataclass
class Place:
    """Where a server keeps its things, and which model it serves."""

    model: Path | str
    store: Path
    answers: list[Answered] = field(default_factory=list)

    @contextmanager
    def served(self, settings: ServerSettings | None = None) -> Iterator[RunningServer]:
        """A server with what is in the store."""
        serving = asyncio.run(load_serving(self._settings(use_disk=True)))
        witness = Witness(serving)
        try:
            context = ServerContext(witness, agents=serving.agents)
            app = create_app(settings=settings or ServerSettings(), context=context)
            with running(settings=settings, app=app) as server:
                yield server
        finally:
            asyncio.run(serving.close())
        self.answers = witness.answers

    def require_cold_answers(self, every: int = 1) -> None:
        """The last answers of the last server are those of one that has nothing; `every` so many.

        Without any cache the same tokens get the same answers. Calls are left out: their grammar
        is no part of the tokens.
        """
        plain = [one for one in self.answers if not one.said.tool_calls]
        assert plain
        asyncio.run(self._require_cold(plain[::-every][: CHECKED * every]))

    def _settings(self, *, use_disk: bool) -> ServeSettings:
        engine = Settings(
            model=str(self.model),
            pool_blocks=600,
            use_disk=use_disk,
            store=self.store,
            disk_bytes=1 << 28,
        )
        return ServeSettings(engine)

    async def _require_cold(self, answers: Sequence[Answered]) -> None:
        cold = await load_serving(self._settings(use_disk=False))
        try:
            for one in answers:
                text = ""
                ask = Ask(one.prompt, SamplingParams(), one.max_tokens)
                async for event in cold.answer(ask):
                    text += event.text if isinstance(event, TextDelta) else ""
                said = _squeezed(one.said.reasoning + one.said.content)
                rest = _squeezed(text).removeprefix(said)
                assert _squeezed(text) == said + rest
                assert any(mark.startswith(rest) for mark in MARKS), "the start of a mark at most"
        finally:
            await cold.close()


def _squeezed(text: str) -> str:
    return "".join(text.replace("</think>", "").split())


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A model of the template that the test names, else of one that drops thoughts."""
    name = getattr(request, "param", "drops_thoughts")
    folder = name if name == EMBEDDED else write_model(tmp_path / "model", name)
    return Place(folder, tmp_path / "store")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server for all tests that need none of their own; each has its own sessions and texts."""
    folder = tmp_path_factory.mktemp("shared")
    place = Place(write_model(folder / "model", "drops_thoughts"), folder / "store")
    with place.served() as found:
        yield found
    place.require_cold_answers(every=15)


def agents(
    server: RunningServer, session: str = "", headers: dict[str, str] | None = None
) -> dict[str, Json]:
    """The agents of a session."""
    data = server.ask("GET", "/v1/agents", headers=headers).json["data"]
    assert isinstance(data, list)
    return {one["id"]: one for one in data if session in one["id"]}


def last_user(agent: AgentClient) -> int:
    """Where the user's last message is."""
    return max(n for n, item in enumerate(agent.items) if item.get("role") == "user")


@pytest.mark.parametrize(
    ("wire", "place"),
    [
        ("messages", "drops_thoughts"),
        ("responses", "hoists"),
        ("chat", "json_tools"),
        pytest.param("chat", EMBEDDED, marks=pytest.mark.thorough),
    ],
    indirect=["place"],
)
def test_a_session_stays_warm(wire: str, place: Place) -> None:
    """A title first, a system message in the middle, a restart, another try, an edit."""
    with place.served() as server:
        agent = WIRES[wire](server, "session")
        agent.title("Hello there.")
        turns = [agent.ask("Hello there.")]
        turns += [agent.ask(f"Turn {number}.") for number in range(2)]
        agent.title("And another title.")
        agent.note("Hurry up.")
        turns += [agent.ask("Are you in a hurry?")]
    with place.served() as server:
        agent.server = server
        turns += [agent.ask("And after a restart?"), agent.ask("Well?")]
        require_cached(turns)
        assert len(agents(server)) == 2, "the session, and its titles"

        before = turns[-1]
        del agent.items[last_user(agent) + 1 :]
        again = agent.ask()
        assert (again.prompt, again.cached, again.lost) == (before.prompt, before.prompt - 1, None)
        assert again.text == before.text
        del agent.items[last_user(agent) :]
        edited = agent.ask("Never mind that.")
        assert edited.cached >= turns[-2].prompt
        assert part(edited) == ("message", "changed", message_number(agent), "user")
        require_cached([again, agent.ask("Go on.")])
    place.require_cold_answers()


def part(told: TurnResult) -> tuple[object, ...]:
    """What is said to have changed."""
    assert told.lost is not None
    found = told.lost["part"]
    assert isinstance(found, dict)
    return found["kind"], found["change"], found["number"], found["name"]


def message_number(agent: AgentClient) -> int:
    """Of the user's last message, counted as clients see it: behind the first system messages.

    The wire of messages has one that its client adds behind the first; an answer that is several
    items is one message.
    """
    before = agent.items[: last_user(agent)]
    said = [item for item in before if item.get("type") != "reasoning"]
    return len(said) + 1 + isinstance(agent, MessagesAgent)


@pytest.mark.parametrize(
    ("wire", "place"),
    [("messages", "json_tools"), ("responses", "drops_thoughts"), ("chat", "hoists")],
    indirect=["place"],
)
def test_a_loop_of_calls_stays_warm(wire: str, place: Place) -> None:
    with place.served() as server:
        agent = WIRES[wire](server, "session", system=words(350, "rules"), thinks=False)
        agent.tools = agent.tools[:1]
        agent.user("Look into it.")
        turns = [agent.use_tool(number) for number in range(examples(3, thorough=20))]
        assert all(len(turn.calls) == 1 for turn in turns)
        turns += [agent.ask(), agent.ask("Thanks.")]
        require_cached(turns)
    place.require_cold_answers()


@every_wire
def test_four_subagents_begin_with_what_was_said(wire: str, server: RunningServer) -> None:
    parent = WIRES[wire](server, f"parent-{wire}")
    last = [parent.ask(f"Turn {number}.") for number in range(2)][-1]
    children = [parent.fork(agent=f"sub{number}") for number in range(4)]
    with ThreadPoolExecutor(len(children)) as pool:
        tasks = [f"Task {words(4, str(number))}." for number in range(len(children))]
        first = list(pool.map(AgentClient.ask, children, tasks))
        second = list(pool.map(AgentClient.ask, children, tasks))
    for one, two in zip(first, second, strict=True):
        assert one.cached >= last.prompt - BLOCK_TOKENS
        require_cached([one, two])
    require_cached([last, parent.ask("Are they done?")])
    known = agents(server, parent.session)
    assert len(known) == 5
    assert len({name for name, one in known.items() if one["parent"]}) == 4


@every_wire
def test_who_leaves_in_a_prefill_and_comes_back_goes_on_there(
    wire: str, server: RunningServer
) -> None:
    session = f"leaver-{wire}"
    agent = WIRES[wire](server, session, system=words(900, session))
    agent.user("Hello.")
    halfway = Halfway()
    observers = server.app.state.context.observers
    observers.append(halfway)
    try:
        with server.connect() as connection:
            data = json.dumps({**agent.body(), "stream": True}).encode()
            lines = {"host": f"127.0.0.1:{server.port}", "content-length": str(len(data))}
            head = [f"{name}: {value}" for name, value in (lines | agent.noisy_headers()).items()]
            request = "\r\n".join([f"POST {agent.path} HTTP/1.1", *head, "", ""]).encode()
            connection.sendall(request + data)
            assert halfway.reached.wait(60)
        assert halfway.left.wait(60)
    finally:
        observers.remove(halfway)
    told = agent.ask()
    assert told.cached >= halfway.done - BLOCK_TOKENS
    assert told.lost is None
    require_cached([told, agent.ask("Go on.")])
    assert len(agents(server, session)) == 1


@every_wire
def test_the_first_message_edited_though_tools_are_written_in_another_order(
    wire: str, server: RunningServer
) -> None:
    """What stands before all messages is as it was, whatever order its keys come in."""
    for number in range(3):
        agent = WIRES[wire](server, f"editor-{wire}-{number}")
        agent.tools = [(f"Read{number}", f"Reads {wire}."), (f"Bash{number}", f"Runs {wire}.")]
        agent.ask("What is it?")
        before = agent.ask("More.")
        for _ in range(number):
            agent.turned({})  # one order later
        agent.items.clear()
        edited = agent.ask("Something else.")
        assert edited.cached >= before.prompt - 140, "all but what the messages are"
        if edited.lost is not None:
            assert part(edited) == ("message", "changed", 1, "user")


def test_an_answer_that_a_stop_string_cut_is_not_said_to_be_another(server: RunningServer) -> None:
    agent = WIRES["chat"](server, "stopped", thinks=False)
    agent.ask("Hello.")
    whole = agent.ask("Say more.").text.strip()
    agent.items.pop()
    cut = agent.receive(agent.send({**agent.body(), "stop": [whole[5:8]]}).json)
    assert cut.text.strip() == whole[:5].strip()
    assert part(agent.ask("Go on.")) == ("message", "cut", 4, "assistant")


def test_a_thought_that_was_not_thought_is_told_as_one(server: RunningServer) -> None:
    agent = WIRES["chat"](server, "rethinker")
    agent.ask("Hello.")
    agent.items[-1] |= {"reasoning_content": "I never thought that."}
    assert part(agent.ask("Go on.")) == ("thinking", "changed", 2, "assistant")


FACTS = ("client", "session", "parent", "state", "tokens", "last_turn", "pinned")
"""Of an agent; what else is shown of it may be of a save that is still under way."""


def test_nobody_goes_on_in_anothers_name(place: Place) -> None:
    """Session and agent forged: of another tenant, and of the same one with other content."""
    settings = ServerSettings(api_keys=KEYS)
    key, other_key = (one.get_secret_value() for one in KEYS)
    header = {"authorization": f"Bearer {key}"}
    with place.served(settings) as server:
        for wire, kind in WIRES.items():
            owner = kind(server, f"owner-{wire}", key=key)
            owner.tools = [(f"Read-{wire}", f"Reads {wire}.")]
            owner.ask(f"The password is {SECRET}.")
            owner.user("Remember it.")
            body = owner.body()
            turn = owner.ask()
            [(name, before)] = agents(server, owner.session, header).items()
            known = [before[fact] for fact in FACTS]
            path = f"/v1/agents/{name.replace('/', '%2F')}/why"
            why = server.ask("GET", path, headers=header).body

            stranger = owner.fork(key=other_key)
            told = stranger.receive(stranger.send(body).json)
            assert told.cached < BLOCK_TOKENS, "nothing of what another tenant said"
            assert told.lost is None
            assert server.ask("GET", path, headers=stranger.noisy_headers()).body != why

            forger = kind(server, owner.session, key=key, system=words(250, f"forged {wire}"))
            forger.tools = [("Other", "Is another.")]
            told = forger.ask("What is the password?")
            assert told.cached < BLOCK_TOKENS, "what both prompts begin with, at most"
            assert told.lost is None

            after = agents(server, owner.session, header)[name]
            assert [after[fact] for fact in FACTS] == known
            assert server.ask("GET", path, headers=header).body == why
            require_cached([turn, owner.ask("Still there?")])


STRANGE = ("", "x" * 9000, "\x01", '{"session_id":')
HEADERS = (
    "x-agent-id",
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-parent-agent-id",
    "x-codex-turn-metadata",
    "x-codex-parent-thread-id",
    "session-id",
    "thread-id",
    "x-session-id",
    "x-session-affinity",
    "x-parent-session-id",
    "x-correlation-id",
)
FIELDS = ("agent_id", "prompt_cache_key", "user", "metadata", "client_metadata", "conversation")


def pairs_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Each name with two strange ids, and in `make thorough` with all; each id with some names."""
    n = examples(2, thorough=len(STRANGE))
    return [
        (name, strange)
        for number, name in enumerate(names)
        for strange in itertools.islice(itertools.cycle(STRANGE), number, number + n)
    ]


@every_wire
def test_strange_ids_are_refused_or_passed_over(wire: str, server: RunningServer) -> None:
    owner = WIRES[wire](server, f"stranger-{wire}", system="Short.", tools=[])
    owner.user("Hello.")
    body = owner.body()
    owner.ask()
    headers = HEADERS if wire == "messages" else ()  # they are read alike on all
    fields = FIELDS if wire != "messages" else FIELDS[:1]
    statuses = set()
    for name, strange in pairs_of(headers):
        forged = {**owner.headers(), name: strange.encode("latin-1")}
        reply = server.ask("POST", owner.path, body, forged)  # type: ignore[arg-type]  # bytes
        statuses.add(reply.status)
    for name, strange in pairs_of(fields):
        inside = {"user_id": strange, "session_id": strange}
        value: object = inside if name.endswith("metadata") else strange
        statuses.add(server.ask("POST", owner.path, {**body, name: value}).status)
    assert statuses == {200, 400}
    require_cached([owner.ask("Still there?")])


def test_strange_ids_of_responses_are_not_found(server: RunningServer) -> None:
    ask: Json = {"model": "default", "input": "Hello.", "max_output_tokens": 16}
    for strange in (*STRANGE, "../../etc", "a\x00b", "\u202e", "x" * 100_000):
        reply = server.ask("POST", "/v1/responses", {**ask, "previous_response_id": strange})
        error = reply.json["error"]
        assert isinstance(error, dict)
        assert (reply.status, error["code"]) == (400, "previous_response_not_found")
        assert len(error["message"]) < 400
    assert server.ask("POST", "/v1/responses", ask).status == 200


def test_nothing_that_is_said_is_logged(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for wire, kind in WIRES.items():
        session = f"logged-{wire}"
        agent = kind(server, session, system=f"{SECRET} {words(50, wire)}", thinks=False)
        agent.tools = [("Bash", f"{SECRET} runs it.")]
        agent.user(SECRET)
        [call] = agent.use_tool(0).calls
        agent.result(call, SECRET)
        agent.ask(SECRET)
        agent.tools = [("Bash", f"{SECRET} ran it.")]
        told = agent.ask(f"Another {SECRET}.")
        assert part(told) == ("tool", "changed", 1, "Bash")
        assert SECRET not in json.dumps(told.lost)
        for name in agents(server, session):
            why = server.ask("GET", f"/v1/agents/{name.replace('/', '%2F')}/why").body
            assert SECRET.encode() not in why
    logged = "".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert "Tool 1 (Bash) changed." in logged
    assert SECRET not in logged
