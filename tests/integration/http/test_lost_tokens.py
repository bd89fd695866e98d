"""A warm agent whose request changed gets a report of the part that did: real models, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import SecretStr

from semantic_server.http.settings import ServerSettings
from tests.support.http_server import RunningServer
from tests.support.lanes import more
from tests.support.model_folder import write_model
from tests.support.served_store import served

pytestmark = pytest.mark.process

Json = dict[str, object]

SYSTEM = " ".join(f"Rule {i} is that {i} plus {i} is {2 * i}." for i in range(16))
TOOLS = ("Read", "Bash", "Web")
SAID = ("What is rule 3?", "It is six.", "And rule 4?", "Eight.", "Rule 5?")
ADA = {"x-agent-id": "ada"}


def tool(name: str, description: str = "Does it.") -> Json:
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def spoken(said: Sequence[str], system: str = SYSTEM) -> list[Json]:
    """What a user and an assistant said in turns."""
    roles = ("user", "assistant")
    messages: list[Json] = [{"role": "system", "content": system}]
    return messages + [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]


def body(messages: list[Json], tools: Sequence[Json] | None = None, **fields: object) -> Json:
    offered = [tool(name) for name in TOOLS] if tools is None else list(tools)
    asked: Json = {"model": "default", "messages": messages, "max_tokens": 6, "temperature": 0}
    asked |= {"tools": offered, "tool_choice": "none"} if offered else {}
    return asked | fields


def ask(
    server: RunningServer,
    asked: Json,
    headers: dict[str, str] = ADA,
    path: str = "chat/completions",
) -> Json:
    reply = server.ask("POST", f"/v1/{path}", asked, headers)
    assert reply.status == 200, reply.body
    return reply.json


def answer(reply: Json) -> Json:
    """The message of a reply."""
    choices = reply["choices"]
    assert isinstance(choices, list)
    message: Json = choices[0]["message"]
    return message


def text(reply: Json) -> str:
    return str(answer(reply)["content"] or "")


def says(role: str, content: str, **fields: object) -> Json:
    return {"role": role, "content": content, **fields}


def lost(reply: Json) -> Json | None:
    """What a reply's usage says was lost."""
    usage = reply["usage"]
    assert isinstance(usage, dict)
    found: Json | None = usage["semantic"]["lost"]
    return found


def part(found: Json | None) -> tuple[object, ...] | None:
    assert found is not None
    told = found["part"]
    assert isinstance(told, dict)
    return told["kind"], told["change"], told["number"], told["name"]


def why(server: RunningServer, headers: dict[str, str] = ADA) -> Json:
    agent = headers["x-agent-id"]
    match = server.ask("GET", f"/v1/agents/{agent}/why", headers=headers).json["match"]
    assert isinstance(match, dict)
    return match


MORE = (*SAID, "Ten.", "Rule 6?")
CHANGES: dict[str, tuple[Json, tuple[object, ...], str]] = {
    "system": (
        body(spoken(MORE, f"Today is Monday. {SYSTEM}")),
        ("system", "changed", 1, "system"),
        "The system message changed.",
    ),
    "a tool": (
        body(spoken(MORE), [tool("Read"), tool("Bash", "Runs it."), tool("Web")]),
        ("tool", "changed", 2, "Bash"),
        "Tool 2 (Bash) changed.",
    ),
    "tool order": (
        body(spoken(MORE), [tool("Read"), tool("Web"), tool("Bash")]),
        ("tool", "moved", 2, "Web"),
        "Tool 2 (Web) moved to another place in the order.",
    ),
    "a tool more": (
        body(spoken(MORE), [tool("Edit"), *map(tool, TOOLS)]),
        ("tool", "added", 1, "Edit"),
        "Tool 1 (Edit) was added.",
    ),
    "a tool less": (
        body(spoken(MORE), [tool("Bash"), tool("Web")]),
        ("tool", "removed", 1, "Read"),
        "Tool 1 (Read) was removed.",
    ),
    "message": (
        body(spoken((MORE[0], MORE[1], "And rule 40?", *MORE[3:]))),
        ("message", "changed", 3, "user"),
        "Message 3 (user) changed.",
    ),
    "answer": (
        body(spoken((MORE[0], "It is seven.", *MORE[2:]))),
        ("message", "changed", 2, "assistant"),
        "Message 2 (assistant) changed.",
    ),
    "last answer": (
        body(spoken(MORE)),
        ("message", "not answered", 6, "assistant"),
        "Message 6 (assistant) differs from the model's answer.",
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for agents that know nothing of each other."""
    with served(tmp_path_factory.mktemp("shared")) as server:
        yield server


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_is_told(shared: RunningServer, change: str) -> None:
    asked, expected, words = CHANGES[change]
    agent = {"x-agent-id": change.replace(" ", "-")}
    assert lost(ask(shared, body(spoken(SAID)), agent)) is None  # a new agent has nothing to lose
    found = _told(shared, asked, agent)
    assert part(found) == expected
    assert str(found["reason"]).startswith(words)


@pytest.mark.parametrize(
    "change", ["a tool less", *more(*(change for change in CHANGES if change != "a tool less"))]
)
def test_each_part_is_told_after_a_restart(tmp_path: Path, change: str) -> None:
    asked, expected, _ = CHANGES[change]
    with served(tmp_path) as server:
        ask(server, body(spoken(SAID)))
    with served(tmp_path) as server:
        assert part(_told(server, asked, ADA)) == expected


def _told(server: RunningServer, asked: Json, agent: dict[str, str]) -> Json:
    """What is reported of a request that changed: in its usage, and by the agent later."""
    reply = ask(server, asked, agent)
    found, match = lost(reply), why(server, agent)
    assert found is not None
    assert found == match["lost"]
    assert found["differs_at"] == match["differs_at"]
    tokens, seconds = found["tokens"], found["seconds"]
    usage = reply["usage"]
    assert isinstance(usage, dict)
    assert isinstance(tokens, int)
    assert isinstance(seconds, float)
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < tokens < computed
    assert 0 < seconds <= match["seconds"]  # type: ignore[operator]  # a number
    return found


def test_nothing_is_lost_by_going_on_and_trying_again(tmp_path: Path) -> None:
    said = ["What is rule 3?"]
    with served(tmp_path) as server:
        for turn in range(3):
            reply = ask(server, body(spoken(said)))
            assert lost(reply) is None
            assert lost(ask(server, body(spoken(said)))) is None  # another try
            said += [text(reply), f"And rule {turn}?"]
    with served(tmp_path) as server:
        assert lost(ask(server, body(spoken(said)))) is None
        assert why(server)["lost"] is None
        assert lost(ask(server, body(spoken(said[:-2])))) is None  # an earlier one again


def test_the_tokens_lost_are_those_behind_the_change(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        ask(server, body(spoken(SAID)))
        ask(server, body(spoken((*SAID[:4], "Rule 50?"))))
        late = lost(ask(server, body(spoken((*SAID[:4], "Rule 500?")))))
        early = lost(ask(server, body(spoken(SAID, f"Listen. {SYSTEM}"))))
    assert late is not None
    assert early is not None
    assert int(str(late["tokens"])) < 60 < int(str(early["tokens"]))
    assert int(str(early["differs_at"])) < int(str(late["differs_at"]))


def without_continuation(folder: Path, template: str) -> Path:
    """A model whose template writes a message's number: no answer can be gone on from."""
    write_model(folder, template)
    config = folder / "tokenizer_config.json"
    loaded = json.loads(config.read_text(encoding="utf-8"))
    mark = "{%- if message.role == 'tool' -%}"
    assert mark in loaded["chat_template"]
    loaded["chat_template"] = loaded["chat_template"].replace(mark, "{{ loop.index }}" + mark)
    config.write_text(json.dumps(loaded), encoding="utf-8")
    return folder


def test_thinking_that_a_template_drops(tmp_path: Path) -> None:
    model = without_continuation(tmp_path / "model", "drops_thoughts")
    with served(tmp_path, model) as server:
        messages, follow = spoken(["Think about it."]), says("user", "And now?")
        reply = ask(server, body(messages, []))
        assert answer(reply)["reasoning_content"]
        found = lost(ask(server, body([*messages, says("assistant", text(reply)), follow], [])))
        assert part(found) == ("thinking", "rendered", 2, "assistant")


def test_thinking_that_a_client_leaves_out(tmp_path: Path) -> None:
    model = without_continuation(tmp_path / "model", "drops_thoughts")
    with served(tmp_path, model) as server:
        calls = [{"id": "c1", "type": "function", "function": {"name": "Read", "arguments": "{}"}}]
        thought = {"reasoning_content": "Hm. " * 20, "tool_calls": calls}
        result = says("tool", "It is there.", tool_call_id="c1")
        asked = spoken(["Read it."])
        ask(server, body([*asked, says("assistant", "", **thought), result]))
        left_out = says("assistant", "", tool_calls=calls)
        found = lost(ask(server, body([*asked, left_out, result])))
        assert part(found) == ("thinking", "removed", 2, "assistant")
        # A question ends the loop, and then the template leaves the thoughts of before it out.
        ask(server, body([*asked, says("assistant", "", **thought), result]))
        later = [says("assistant", "Done."), says("user", "Thanks.")]
        found = lost(ask(server, body([*asked, says("assistant", "", **thought), result, *later])))
        assert part(found) == ("thinking", "rendered", None, None)


def test_a_template_that_writes_the_same_in_another_way(tmp_path: Path) -> None:
    model = without_continuation(tmp_path / "model", "hoists")
    with served(tmp_path, model) as server:
        messages = spoken(["Hello."])
        said = says("assistant", text(ask(server, body(messages, []))))
        late = [said, says("system", "Hurry."), says("user", "Well?")]
        found = lost(ask(server, body([*messages, *late], [])))
        assert part(found) == ("template", "rendered", None, None)
        assert found is not None
        assert str(found["reason"]).startswith("Nothing in the request changed, but the template")


def test_a_template_option(tmp_path: Path) -> None:
    with served(tmp_path, write_model(tmp_path / "model", "qwen3_coder")) as server:
        options = {"enable_thinking": False}
        ask(server, body(spoken(SAID), chat_template_kwargs=options))
        options = {"enable_thinking": True}
        asked = body(spoken(MORE), chat_template_kwargs=options)
        assert part(lost(ask(server, asked))) == ("option", "changed", None, "enable_thinking")


def test_replay_leaves_nothing_to_tell(tmp_path: Path) -> None:
    with served(tmp_path, write_model(tmp_path / "model", "drops_thoughts")) as server:
        messages = spoken(["Think about it."])
        for number in range(3):
            reply = ask(server, body(messages, []))
            assert lost(reply) is None
            messages += [says("assistant", text(reply)), says("user", f"And {number}?")]


def test_thinking_left_out_where_its_tokens_stand_is_not_to_blame(tmp_path: Path) -> None:
    with served(tmp_path, write_model(tmp_path / "model", "drops_thoughts")) as server:
        messages = spoken(["Think about it."])
        reply = ask(server, body(messages, []))
        thought = str(answer(reply)["reasoning_content"])
        said = says("assistant", text(reply), reasoning_content=thought)
        assert lost(ask(server, body([*messages, said, says("user", "And now?")], []))) is None
        silent = says("assistant", text(reply))
        found = lost(ask(server, body([*messages, silent, says("user", "Or later?")], [])))
        assert part(found) == ("message", "changed", 3, "user")


@pytest.mark.parametrize("restart", [False, True], ids=["warm", "restarted"])
def test_a_session_whose_system_message_changed_is_the_same_agent(
    tmp_path: Path, restart: bool
) -> None:
    session = {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}
    changed = body(spoken(MORE, f"Today is Monday. {SYSTEM}"))
    with served(tmp_path) as server:
        ask(server, body(spoken(SAID)), session)
        found = None if restart else lost(ask(server, changed, session))
    if restart:
        with served(tmp_path) as server:
            found = lost(ask(server, changed, session))
    assert part(found) == ("system", "changed", 1, "system")


def test_nobody_is_told_of_anothers_agent(tmp_path: Path) -> None:
    keys = SecretStr("key-of-a" * 4), SecretStr("key-of-b" * 4)
    settings = ServerSettings(api_keys=keys)
    a, b = ({"authorization": f"Bearer {key.get_secret_value()}"} | ADA for key in keys)
    with served(tmp_path, settings=settings) as server:
        ask(server, body(spoken(SAID)), a)
        other = body(spoken(SAID, f"Listen. {SYSTEM}"))
        assert lost(ask(server, other, b)) is None
        assert why(server, b)["lost"] is None
        assert part(lost(ask(server, other, a))) == ("system", "changed", 1, "system")


def test_every_wire_tells_it(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        ask(server, body(spoken(SAID), []))
        changed = spoken(SAID, f"Listen. {SYSTEM}")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        streamed = server.ask("POST", "/v1/chat/completions", body(changed, [], **options), ADA)
        *_, last, _ = streamed.body.decode().strip().split("\n\n")
        found = lost(json.loads(last.removeprefix("data: ")))
        assert part(found) == ("system", "changed", 1, "system")

        plain = {"model": "default", "max_tokens": 4, "prompt": "Another prompt altogether. " * 9}
        found = lost(ask(server, plain, path="completions"))
        assert found is not None
        assert found["part"] is None
        assert isinstance(found["differs_at"], int)

        heard = [{"role": "user", "content": "Hello"}]
        message = {"model": "default", "max_tokens": 4, "messages": heard}
        ask(server, message | {"system": SYSTEM}, path="messages")
        found = lost(ask(server, message | {"system": f"Hear. {SYSTEM}"}, path="messages"))
        assert part(found) == ("system", "changed", 1, "system")

        response = {"model": "default", "max_output_tokens": 16, "input": "Hello", "store": False}
        ask(server, response | {"instructions": SYSTEM}, path="responses")
        found = lost(ask(server, response | {"instructions": f"1. {SYSTEM}"}, path="responses"))
        assert part(found) == ("system", "changed", 1, "system")


def test_no_text_of_a_prompt_is_told(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        ask(server, body(spoken(SAID)))
        secret = "The password is swordfish."
        found = lost(ask(server, body(spoken((secret, *MORE[1:])))))
        assert part(found) == ("message", "changed", 1, "user")
        assert "swordfish" not in json.dumps(found)
