"""Agents of sessions: a conversation is found again, and nothing else is taken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semantic.application.agents.finder import AgentFinder, AgentNames, SessionAgents, is_auto_named
from semantic.application.cache.agent_notes import (
    Origin,
    origin_in,
    origin_of,
    session_and_client_in,
)
from semantic.application.chat.preparation import Prepared
from semantic.domain.block_hash import Scope, tenant_tag
from semantic.domain.chat import Chat, Message, Tool
from semantic.domain.identity import Identity
from semantic.domain.request_parts import parts_of
from semantic.domain.stored import Manifest
from semantic.domain.value_objects import SamplingParams
from semantic.ports.serving import Ask

SECRET = bytes(32)
TOOLS = (Tool("read"), Tool("write"))
SYSTEM = "You are an agent that works on the code of its user. " * 20
TITLE = "Write a title for what follows, of six words at most. " * 5
PLAIN = Identity("ses_1")
OPENCODE = Identity("ses_1", "opencode")
USER = Identity("bob", shared=True)


def tag(tenant: str) -> bytes:
    return tenant_tag(SECRET, tenant)


class World:
    """Requests that end at once; a prompt is its characters, and ends as every template's does."""

    def __init__(self) -> None:
        self.finder = AgentFinder(tag)
        self.names = AgentNames(self.finder)
        self.saved: dict[tuple[str, str], Manifest] = {}

    def prepared(self, chat: Chat) -> Prepared:
        tools = "".join(f"[{tool.name}]" for tool in chat.tools)
        text = tools + "".join(f"<{one.role}>{one.content}</>" for one in chat.messages)
        tokens = tuple(map(ord, f"{text}<assistant>"))
        parts = parts_of(chat)
        return Prepared(tokens, 10, SamplingParams(), chat, opens_thought=False, parts=parts)

    def ask(
        self,
        *said: str,
        identity: Identity | None = OPENCODE,
        tools: tuple[Tool, ...] = TOOLS,
        system: str = SYSTEM,
        agent: str | None = None,
        tenant: str = "",
    ) -> str:
        """The agent of a request for this conversation, which begins with its user."""
        prepared, ask = self.request(said, identity, tools, system, agent, tenant)
        with self.names.claimed(prepared, ask) as name:
            note = self.names.note(name, prepared, ask)
            scope = Scope(bytes(32), tag(tenant))
            n = len(prepared.tokens)
            saved = Manifest(scope, name, prepared.tokens, prompt_tokens=n, note=note)
            self.saved.pop((tenant, name), None)
            self.saved[tenant, name] = saved
        return name

    def request(
        self,
        said: tuple[str, ...],
        identity: Identity | None = OPENCODE,
        tools: tuple[Tool, ...] = TOOLS,
        system: str = SYSTEM,
        agent: str | None = None,
        tenant: str = "",
    ) -> tuple[Prepared, Ask]:
        first = (Message("system", system),) if system else ()
        rest = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(said)]
        chat = Chat((*first, *rest), tools)
        ask = Ask(chat, SamplingParams(), None, agent, tenant, identity)
        return self.prepared(chat), ask

    def restarted(self) -> World:
        """The same after a restart: only what was saved is left."""
        world = World()
        world.saved = dict(self.saved)
        world.finder.restore(reversed(self.saved.values()))
        return world


@pytest.fixture
def world() -> World:
    return World()


def test_a_conversation_goes_on_as_the_same_agent(world: World) -> None:
    said = ["Hello"]
    for turn in range(20):
        assert world.ask(*said) == "opencode/ses_1"
        said += [f"Answer {turn}", f"Question {turn}"]


@pytest.mark.parametrize("identity", [OPENCODE, PLAIN, USER])
def test_edited_and_regenerated_turns_find_their_agent(world: World, identity: Identity) -> None:
    name = world.ask("Hello", identity=identity)
    turns = ["Hello", "Hi", "What is this?", "A test", "Why?"]
    assert world.ask(*turns, identity=identity) == name
    assert world.ask(*turns, identity=identity) == name  # regenerated
    assert world.ask(*turns[:2], "What is that?", identity=identity) == name  # edited
    assert world.ask(*turns[:2], "What?", "This", "And that?", identity=identity) == name
    assert world.ask("Hello", identity=identity) == name  # from the start
    assert len(world.finder) == 1


LISTEN = f"Today is another day. {SYSTEM}"


def test_a_conversation_whose_system_message_or_tools_changed_is_the_same(world: World) -> None:
    said = ["Hello", "Hi", "What is this?"]
    name = world.ask(*said[:1])
    assert world.ask(*said[:1], system=LISTEN) == name
    assert world.ask(*said) == name
    said += ["A test", "Why?"]
    assert world.ask(*said, tools=(Tool("edit"), *TOOLS)) == name
    world = world.restarted()
    said += ["Because", "Oh"]
    assert world.ask(*said, system=LISTEN) == name
    assert len(world.finder) == 1


def test_what_was_said_must_be_the_same_in_half_of_it(world: World) -> None:
    name = world.ask("Hello", "Hi", "What is this?", "A test", "Why?", "So", "Oh")
    assert world.ask("Hello", "Hi", "A", "B", "C", "D", "E", system=TITLE) == f"{name}~2"
    assert world.ask("Hi", "Hello", "What?", system=SYSTEM[::-1]) == f"{name}~3"
    assert world.ask("Hello", "Hi", "What is this?", system=LISTEN) == name


def test_a_question_without_tools_and_answers_is_no_conversation(world: World) -> None:
    plain = world.ask("Hello", tools=(), identity=PLAIN)
    assert world.ask("Hello", tools=(), identity=PLAIN, system=TITLE) == f"{plain}~2"
    talk = "Hello", "Hi", "What?"
    for system in (SYSTEM[::-1], TITLE[::-1]):
        assert world.ask(*talk, tools=(), identity=PLAIN, system=system) == f"{plain}~3"


def test_a_title_call_first_does_not_take_the_conversations_name(world: World) -> None:
    title = world.ask("Hello", tools=(), system=TITLE)
    assert title == "opencode/ses_1~2"
    assert world.ask("Hello") == "opencode/ses_1"
    assert world.ask("Hello", "Hi", "And now?") == "opencode/ses_1"
    assert world.ask("Hello", tools=(), system=TITLE) == title


@pytest.mark.parametrize("identity", [OPENCODE, PLAIN, USER])
def test_another_kind_of_call_becomes_a_sibling(world: World, identity: Identity) -> None:
    turns = ["Hello", "Hi", "And now?"]
    name = world.ask(*turns, identity=identity)
    before = world.saved["", name]
    others = {
        world.ask("Hello", system=TITLE, tools=(), identity=identity),
        world.ask(f"Write a title for: {turns}", system="", tools=(), identity=identity),
        world.ask(*turns, "Summarize all this.", tools=(), identity=identity),
        world.ask("quota", system="", tools=(), identity=identity),
    }
    assert name not in others
    assert len(others) == 4
    assert all(identity.number(other) for other in others)
    assert world.saved["", name] is before
    assert world.ask(*turns, "Ok", "Go on", identity=identity) == name


def test_what_goes_on_wins_over_what_only_begins_alike(world: World) -> None:
    long = "The same for both. " * 300
    first = world.ask(long, "Hi", "One")
    second, ask = world.request((long, "Hi", "Two"))
    with world.names.claimed(*world.request((long, "Hi", "One"))) as busy:
        assert busy == first
        with world.names.claimed(second, ask) as name:
            assert name == "opencode/ses_1~2"
    assert world.ask(long, "Hi", "One", "x", "y") == first
    assert world.ask(long, "Hi", "Two", "x", "y") == name
    assert world.ask(long, "Hi", "One", "x", "y", "z", "?") == first


def test_of_two_that_have_as_much_in_common_the_last_used_goes_on(world: World) -> None:
    request = world.request(("Hello",))
    with world.names.claimed(*request) as one, world.names.claimed(*request) as two:
        pass
    with world.names.claimed(*request) as busy:
        assert busy == two
        assert world.ask("Hello") == one
    assert world.ask("Hello", "Hi", "Go on") == one


def test_requests_at_once_are_of_several_agents(world: World) -> None:
    request = world.request(("Hello",))
    with world.names.claimed(*request) as one, world.names.claimed(*request) as two:
        assert (one, two) == ("opencode/ses_1", "opencode/ses_1~2")
    assert world.ask("Hello", "Hi", "Again") in {one, two}


def test_a_resend_after_a_disconnect_is_of_the_same_agent(world: World) -> None:
    request = world.request(("Hello",))
    with pytest.raises(ConnectionError), world.names.claimed(*request) as first:
        raise ConnectionError
    assert world.ask("Hello") == first


def test_subagents_are_agents_of_their_own(world: World) -> None:
    main = Identity("s", "claude-code")
    name = world.ask("Hello", identity=main)
    for number in range(4):
        sub = Identity("s", "claude-code", f"a{number}", main.name)
        assert world.ask("Hello", "Hi", f"Task {number}", identity=sub) == f"{name}/a{number}"
    assert world.ask("Hello", "Hi", "Go on", identity=main) == name
    assert len(world.finder) == 5


def test_conversations_of_one_user_are_told_apart(world: World) -> None:
    """Their instructions are the same, and most of what short prompts have in common."""
    first = world.ask("What is the weather?", identity=USER)
    second = world.ask("Write a poem.", identity=USER)
    assert (first, second) == ("session/bob", "session/bob~2")
    assert world.ask("What is the weather?", "Fine", "And now?", identity=USER) == first
    assert world.ask("Write a poem.", "No", "Please", identity=USER) == second


def test_a_name_that_somebody_gave_wins_and_is_never_found(world: World) -> None:
    assert world.ask("Hello", agent="ada") == "ada"
    assert len(world.finder) == 0
    assert world.ask("Hello") == "opencode/ses_1"
    assert session_and_client_in(world.saved["", "ada"].note) == ("ses_1", "opencode")
    assert len(world.restarted().finder) == 1


def test_who_knows_the_name_may_go_on_as_it(world: World) -> None:
    name = world.ask("Hello")
    later = ("Hello", "Hi", "And " * 500)
    assert world.ask(*later, agent=name, identity=None) == name
    assert session_and_client_in(world.saved["", name].note) == ("ses_1", "opencode")
    assert world.ask(*later, "x", "y") == name


def test_no_name_is_taken_from_another_identity_by_force(world: World) -> None:
    name = world.ask("Hello")
    other = Identity("ses_2", "opencode")
    assert world.ask("Hello", agent=name, identity=other) == name
    assert session_and_client_in(world.saved["", name].note) == ("ses_1", "opencode")
    assert world.ask("Hello", "Hi", "Go on", identity=other) == "opencode/ses_2"
    assert world.ask("Hello", agent=name, identity=other, system=TITLE * 9) == name
    assert world.ask("Hello", "Hi", "Go on", system=TITLE * 9) == name


def test_tenants_do_not_see_each_others_sessions(world: World) -> None:
    world.ask("Hello", tenant="a", tools=())
    assert world.ask("Hello", tenant="b") == "opencode/ses_1"
    assert len(world.finder) == 2
    world.finder.forget("opencode/ses_1", "b")
    assert world.finder.origin("opencode/ses_1~2", "a") is not None


def test_without_an_identity_nobody_of_a_session_is_found(world: World) -> None:
    world.ask("Hello")
    assert is_auto_named(world.ask("Hello", "Hi", "Go on", identity=None))


def test_agents_are_found_again_after_a_restart(world: World) -> None:
    title = world.ask("Hello", tools=(), system=TITLE)
    name = world.ask("Hello")
    child = Identity("ses_2", "opencode", None, name)
    world.ask("Look around", identity=child)
    world = world.restarted()
    assert world.ask("Hello", "Hi", "Go on") == name
    assert world.ask("Hello again", tools=(), system=TITLE) == title
    origin = world.finder.origin(child.name, "")
    assert origin is not None
    assert origin.identity == child
    assert world.ask("Something else", tools=(), system="x" * 500) == "opencode/ses_1~3"


def test_a_fork_is_not_of_the_session(world: World) -> None:
    name = world.ask("Hello")
    world.saved["", "copy"] = replace(world.saved["", name], agent_id="copy", parent=name)
    world = world.restarted()
    assert len(world.finder) == 1
    assert world.ask("Hello", "Hi", "Go on") == name


def test_who_was_forgotten_is_not_found() -> None:
    world = World()
    world.finder.forget(world.ask("Hello"), "")
    with world.names.claimed(*world.request(("Hello", "Hi", "Go on"))) as name:
        assert name == "opencode/ses_1"  # the name is free again
    world.finder.forget(name, "")
    assert len(world.finder) == 0


def test_only_so_many_are_remembered_and_no_name_is_given_twice() -> None:
    agents = SessionAgents(max_agents=6, max_siblings=3)

    def asked(identity: Identity, seed: int) -> str:
        origin = Origin(identity, "plain")
        tokens = range(seed * 1000, seed * 1000 + 100)
        name = agents.find(b"", origin, tokens, ())
        assert agents.remember(b"", name, origin, tokens)
        return name

    names = [asked(PLAIN, seed) for seed in range(5)]
    assert names == ["session/ses_1", *(f"session/ses_1~{n}" for n in range(2, 6))]
    assert len(agents) == 3
    assert asked(PLAIN, 4) == names[4]
    assert asked(PLAIN, 0) == "session/ses_1~6"
    others = [asked(Identity(f"ses_{n}"), n) for n in range(2, 12)]
    assert len(agents) == 6
    assert agents.origin(b"", others[-1]) is not None
    assert agents.origin(b"", others[0]) is None


@pytest.mark.parametrize(
    "identity",
    [OPENCODE, PLAIN, USER, Identity("s", "claude-code", "a", "claude-code/s"), Identity("ä/~")],
)
def test_a_note_is_read_as_it_was_written(identity: Identity) -> None:
    origin = origin_of(identity, Chat((Message("user", "Hello"),), TOOLS))
    assert origin_in(origin.note()) == origin


@pytest.mark.parametrize(
    "note",
    [
        "",
        "hello",
        '{"origin"',
        '{"origin": 1}',
        '{"origin": 2, "session": "s", "client": "", "kind": "plain"}',
        '{"origin": 1, "session": "s", "client": 3, "kind": "plain"}',
        '{"origin": 1, "session": "s\\n", "client": "", "kind": "plain"}',
        '{"origin": 1, "session": "s", "client": "", "kind": ""}',
        '{"origin": 1, "session": "s", "client": "", "kind": "plain", "agent": 1}',
        '{"origin": 1, "session": "s", "client": "", "kind": "plain", "parent": ""}',
        '{"origin": 1, "session": "s", "client": "", "kind": "plain", "parent": ["p"]}',
        '{"origin": ' + "[" * 100_000,
        '{"messages": []}',
    ],
)
def test_another_note_tells_of_nobody(note: str) -> None:
    assert origin_in(note) is None
    assert session_and_client_in(note) == (None, None)


@pytest.mark.parametrize("identity", [OPENCODE, None])
def test_a_request_that_is_not_kept_claims_no_agent(
    world: World, identity: Identity | None
) -> None:
    name = world.ask("Hello", identity=identity)
    known = len(world.finder)
    prepared, ask = world.request(("Hello", "Hi", "Go on"), identity)
    other, new = world.request(("Something else",), None)
    with world.names.claimed(prepared, replace(ask, keep=False)) as unkept:
        assert unkept == name  # whose cache it reads
        with world.names.claimed(prepared, ask) as kept:
            assert kept == name
    with world.names.claimed(other, replace(new, keep=False)) as unknown:
        assert unknown != name
    assert len(world.finder) == known
