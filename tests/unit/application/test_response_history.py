"""A conversation up to a response: the whole chain, or nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semantic.application.chat.memory_responses import MemoryResponses
from semantic.domain.chat import Tool
from semantic.domain.responses import StoredResponse
from semantic_server.http.openai.responses.request import ResponseGoneError, history_of
from tests.support.stored_responses import response


def kept(*responses: StoredResponse) -> MemoryResponses:
    found = MemoryResponses(1 << 24)
    for one in responses:
        found.put("t", one)
    return found


def test_a_history_is_all_that_was_said_in_order() -> None:
    first, second, third = response(1), response(2, "resp_1"), response(3, "resp_2")
    found = history_of(kept(third, first, second), "t", "resp_3")
    chain = (first, second, third)
    assert found.messages == tuple(m for one in chain for m in (*one.input, *one.output))
    assert found.agent == "agent-3"


def test_the_newest_tool_of_a_name_counts() -> None:
    newer = Tool("look", "Looks twice.")
    second = replace(response(2, "resp_1"), tools=(newer, Tool("hear")))
    found = history_of(kept(response(1), second), "t", "resp_2")
    assert found.tools == (newer, Tool("hear"))


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_part_of_a_history_is_none(lost: int) -> None:
    chain = [response(1), response(2, "resp_1"), response(3, "resp_2")]
    del chain[lost - 1]
    with pytest.raises(ResponseGoneError) as gone:
        history_of(kept(*chain), "t", "resp_3")
    assert gone.value.response_id == f"resp_{lost}"


def test_a_circle_is_no_history() -> None:
    with pytest.raises(ResponseGoneError):
        history_of(kept(response(1, "resp_2"), response(2, "resp_1")), "t", "resp_1")


def test_another_tenants_history_is_none() -> None:
    with pytest.raises(ResponseGoneError):
        history_of(kept(response(1)), "u", "resp_1")
