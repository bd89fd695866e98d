"""How long an agent is away after a tool: by the tool's name, for each tenant, and bounded."""

from __future__ import annotations

import pytest

from semantic.application.cache.read_ahead import ToolTimes
from tests.support.fake_clock import FakeClock


class Agents:
    """Agents that call tools and return, on a clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.times = ToolTimes(self.clock)

    def away(self, seconds: float, *tools: str, agent: str = "ada", tenant: str = "") -> None:
        self.times.called(agent, tenant, tools)
        self.clock.advance(seconds)
        self.times.returned(agent, tenant)

    def usual(self, *tools: str, tenant: str = "") -> float | None:
        return self.times.called("another", tenant, tools)


@pytest.fixture
def agents() -> Agents:
    return Agents()


def test_a_tool_is_expected_to_take_its_usual_time_from_the_third_call_on(agents: Agents) -> None:
    usual = []
    for seconds in (4, 9, 5, 6):
        usual.append(agents.usual("Bash"))
        agents.away(seconds, "Bash")
    assert usual == [None, None, None, 5]
    assert agents.usual("Bash") == 5.5
    assert agents.usual("Read") is None


def test_an_outlier_changes_little_and_the_latest_times_count(agents: Agents) -> None:
    for seconds in (2, 2, 86_400, 3, 2):
        agents.away(seconds, "Read")
    assert agents.usual("Read") == 2
    for _ in range(32):
        agents.away(10, "Read")
    assert agents.usual("Read") == 10


def test_of_several_tools_the_slowest_is_waited_for_and_none_learned(agents: Agents) -> None:
    for _ in range(3):
        agents.away(1, "Read")
        agents.away(20, "Bash", "Bash")  # one tool, called twice
    for _ in range(5):
        agents.away(100, "Read", "Bash")
        agents.away(100, "Read", "New")
    assert agents.usual("Read", "Bash", "New") == 20
    assert agents.usual("Read") == 1
    assert agents.usual("New") is None


def test_an_answer_without_calls_is_none(agents: Agents) -> None:
    for _ in range(3):
        agents.times.called("ada", "", ["Read"])
        agents.away(500)
    assert agents.usual("Read") is None
    assert agents.usual() is None


def test_tenants_and_agents_are_apart(agents: Agents) -> None:
    for _ in range(3):
        agents.away(7, "Read", tenant="x")
    agents.times.returned("ada", "y")
    assert agents.usual("Read", tenant="x") == 7
    assert agents.usual("Read", tenant="y") is None


def test_what_is_remembered_is_bounded_and_one_tenant_does_not_displace_another(
    agents: Agents,
) -> None:
    for _ in range(3):
        agents.away(7, "Read", tenant="x")
    for number in range(1500):
        agents.away(1, f"tool {number}", tenant="y")
        agents.times.called(f"agent {number}", "y", ["never back"])
    assert agents.usual("Read", tenant="x") == 7
    assert len(agents.times._seconds) == 1000
    for number in range(12_000):
        agents.times.called(str(number), "y", ["never back"])
    assert len(agents.times._away) == 10_000


def test_a_name_that_is_too_long_is_not_remembered(agents: Agents) -> None:
    for _ in range(3):
        agents.away(1, "x" * 129)
    assert agents.usual("x" * 129) is None
    assert len(agents.times._seconds) == 0
