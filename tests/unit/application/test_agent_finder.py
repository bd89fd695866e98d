"""`AgentFinder`: a request without a name is of the agent whose last prompt it goes on from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantic.application.agents.finder import AgentFinder, is_auto_named
from semantic.domain.block_hash import Scope, tenant_tag
from semantic.domain.stored import Manifest
from tests.support.steps import Steps

SECRET = bytes(32)


def tag(tenant: str) -> bytes:
    return tenant_tag(SECRET, tenant)


def finder(max_agents: int = 100) -> AgentFinder:
    return AgentFinder(tag, max_agents)


def name(number: int) -> str:
    return f"auto-{number:012x}"


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(seed * 1000 + i for i in range(n))


def test_an_unknown_prompt_gets_a_new_name_each_time() -> None:
    agents = finder()
    first, second = (agents.find(prompt(600), "") for _ in range(2))
    assert first != second
    assert is_auto_named(first)
    assert len(agents) == 0


@pytest.mark.parametrize("n", [1, 10, 255, 256, 257, 512, 700])
def test_who_goes_on_is_found(n: int) -> None:
    agents = finder()
    agents.remember(name(1), prompt(n), "")
    assert agents.find(prompt(n), "") == name(1)
    assert agents.find(prompt(n + 1), "") == name(1)
    assert agents.find(prompt(n + 1000), "") == name(1)
    assert agents.find(prompt(n - 1), "") != name(1)
    assert agents.find((*prompt(n - 1), 99_999, 1), "") != name(1)


def test_the_longest_prompt_wins_and_of_two_the_last_used() -> None:
    agents = finder()
    for number, n in enumerate((300, 700, 699, 10), 1):
        agents.remember(name(number), prompt(n), "")
    assert agents.find(prompt(800), "") == name(2)
    assert agents.find(prompt(699), "") == name(3)
    assert agents.find(prompt(299), "") == name(4)
    agents.remember(name(9), prompt(700), "")
    assert agents.find(prompt(800), "") == name(9)
    agents.remember(name(2), prompt(700), "")
    assert agents.find(prompt(800), "") == name(2)


def test_who_is_busy_is_not_found() -> None:
    agents = finder()
    agents.remember(name(1), prompt(300), "")
    agents.remember(name(2), prompt(500), "")
    assert agents.find(prompt(600), "", {name(2)}) == name(1)
    assert agents.find(prompt(600), "", {name(1), name(2)}) not in (name(1), name(2))


def test_a_named_agent_is_never_found() -> None:
    agents = finder()
    for own in ("ada", "auto-", "auto-XYZ", "auto-0123456789abc", "auto-0123456789ab\n"):
        agents.remember(own, prompt(300), "")
        assert not is_auto_named(own)
    assert is_auto_named(agents.find(prompt(400), ""))
    assert len(agents) == 0


def test_tenants_do_not_find_each_others_agents() -> None:
    agents = finder()
    agents.remember(name(1), prompt(300), "a")
    agents.remember(name(1), prompt(300, seed=1), "b")
    assert agents.find(prompt(400), "a") == name(1)
    assert agents.find(prompt(400), "b") != name(1)
    agents.forget(name(1), "b")
    assert agents.find(prompt(400), "a") == name(1)
    assert agents.find(prompt(400, seed=1), "b") != name(1)


def test_who_was_forgotten_is_not_found() -> None:
    agents = finder()
    agents.remember(name(1), prompt(300), "")
    agents.remember(name(2), prompt(310), "")
    agents.forget(name(2), "")
    assert agents.find(prompt(400), "") == name(1)
    assert len(agents) == 1
    agents.forget(name(1), "")
    assert agents.find(prompt(400), "") != name(1)
    agents.forget(name(3), "")
    assert len(agents) == 0


def test_only_so_many_are_remembered() -> None:
    agents = finder(max_agents=3)
    for number in range(5):
        agents.remember(name(number), prompt(300, number), "")
        agents.remember(name(0), prompt(300, 0), "")
    assert len(agents) == 3
    found = [agents.find(prompt(301, number), "") == name(number) for number in range(5)]
    assert found == [True, False, False, True, True]


def test_nothing_is_remembered_of_an_empty_prompt() -> None:
    agents = finder()
    agents.remember(name(1), (), "")
    assert agents.find(prompt(5), "") != name(1)


def test_an_imported_agent_is_found_by_its_name_only() -> None:
    agents = finder()
    imported = Scope(bytes(32), tag("a"), salt=b"salt")
    agents.restore([Manifest(imported, name(1), prompt(700), prompt_tokens=600)])
    assert agents.find(prompt(700), "a") != name(1)


def test_agents_are_found_again_after_a_restart() -> None:
    agents = finder()
    scope = Scope(bytes(32), tag("a"))
    agents.restore(
        [
            Manifest(scope, name(1), prompt(700), prompt_tokens=600),
            Manifest(scope, name(2), prompt(800), prompt_tokens=600),
            Manifest(scope, "ada", prompt(900), prompt_tokens=900),
        ]
    )
    assert agents.find(prompt(1000), "a") == name(1)  # the one saved last
    assert agents.find((*prompt(600), 5), "a") == name(1)
    assert not {agents.find(prompt(1000), "b")} & {name(1), name(2)}


_prompts = st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=6)


def _long(pieces: list[int]) -> tuple[int, ...]:
    """A prompt of pieces of 100 tokens: many begin alike, and end on both sides of a block."""
    return tuple(token for piece in pieces for token in (piece,) * 128)


@given(_prompts, st.lists(st.integers(0, 1), max_size=5), st.sets(st.integers(0, 5)))
def test_it_finds_what_comparing_all_would(
    histories: list[list[int]], wanted: list[int], busy: set[int]
) -> None:
    agents = finder()
    for number, pieces in enumerate(histories):
        agents.remember(name(number), _long(pieces), "")
    tokens = _long(wanted)
    fitting = [
        (len(pieces), number)
        for number, pieces in enumerate(histories)
        if pieces and wanted[: len(pieces)] == pieces and number not in busy
    ]
    found = agents.find(tokens, "", {name(number) for number in busy})
    if fitting:
        assert found == name(max(fitting)[1])
    else:
        assert found not in {name(number) for number in range(len(histories))}


def test_thousands_of_agents_that_begin_alike_take_no_more_steps_than_a_few() -> None:
    beginning, taken = prompt(20_000), []
    for n_agents in (10, 2000):
        agents = finder(max_agents=5000)
        for number in range(n_agents):
            tail = (number, *range(100))
            agents.remember(
                name(number), beginning + tail if number % 2 else beginning[:9000] + tail, ""
            )
        last = n_agents - 1
        for asked, expected in (
            ((*beginning, last, *range(200)), name(last)),
            ((*beginning[:9000], last - 1, *range(12_000)), name(last - 1)),
        ):
            steps = Steps()
            with steps.counting():
                found = agents.find(asked, "")
            assert found == expected
            taken.append(steps.n)
    assert taken[:2] == taken[2:]
    assert min(taken) > 10, "nothing was counted"
