"""What agents report is read as they mean it; a report of failure is never taken for a good one."""

from __future__ import annotations

import json

import pytest

from tests.agents.agents import (
    AGENTS,
    STRANGERS,
    Report,
    ReportError,
    named,
    read_claude,
    read_codex,
    read_opencode,
)

Document = dict[str, object]

CLAUDE: Document = {
    "is_error": False,
    "result": "Done.",
    "usage": {"input_tokens": 5, "cache_creation_input_tokens": 15, "cache_read_input_tokens": 80},
    "modelUsage": {"m": {"contextWindow": 4096}},
}
CODEX: list[Document] = [
    {"type": "thread.started", "thread_id": "1"},
    {"type": "item.completed", "item": {"type": "agent_message", "text": "Done."}},
    {"type": "turn.completed", "usage": {"input_tokens": 100, "cached_input_tokens": 80}},
]
OPENCODE: list[Document] = [
    {"type": "text", "part": {"type": "text", "text": "Done."}},
    {
        "type": "step_finish",
        "part": {"type": "step-finish", "tokens": {"input": 15, "cache": {"read": 80, "write": 5}}},
    },
]


def lines(documents: list[Document]) -> str:
    return "\n".join(json.dumps(document) for document in documents) + "\n"


def test_a_prompt_is_all_of_its_parts() -> None:
    assert read_claude(json.dumps(CLAUDE)) == Report("Done.", 100, 80, 4096)
    assert read_codex(lines(CODEX)) == Report("Done.", 100, 80)
    assert read_opencode(lines(OPENCODE)) == Report("Done.", 100, 80)
    assert Report("", 100, 80).cached_share == 0.8
    assert Report("", 0, 0).cached_share == 0


def test_steps_of_one_turn_are_added() -> None:
    assert read_opencode(lines([*OPENCODE, *OPENCODE])) == Report("Done.Done.", 200, 160)


def test_a_turn_is_what_came_since_the_last() -> None:
    assert Report("b", 300, 170).since(Report("a", 100, 0)) == Report("b", 200, 170)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: str(agent.name))
@pytest.mark.parametrize("printed", ["", "no JSON", "[]", "{}", '{"type": "error"}'])
def test_what_is_no_report_is_refused(agent: object, printed: str) -> None:
    found = next(one for one in AGENTS if one is agent)
    with pytest.raises(ReportError):
        found.read(printed)


def test_a_report_of_failure_is_refused() -> None:
    with pytest.raises(ReportError, match="Connection refused"):
        read_claude(json.dumps(CLAUDE | {"is_error": True, "result": "Connection refused"}))
    with pytest.raises(ReportError, match="did not complete"):
        read_codex(lines([{"type": "turn.failed", "error": {"message": "no"}}]))
    with pytest.raises(ReportError, match="did not complete"):
        read_opencode(lines([*OPENCODE, {"type": "error", "error": {"name": "no"}}]))
    with pytest.raises(ReportError, match="several contexts"):
        read_claude(
            json.dumps(
                CLAUDE | {"modelUsage": {"m": {"contextWindow": 1}, "n": {"contextWindow": 2}}}
            )
        )


def test_agents_are_found_by_name() -> None:
    assert named(()) == [*AGENTS, *STRANGERS]
    assert [agent.name for agent in named(("opencode",))] == ["opencode"]
    with pytest.raises(KeyError):
        named(("nobody",))
