"""A client compacts its history and takes that back: over HTTP, the old history is still cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.http.test_lost_tokens import ask, body, spoken, text
from tests.support.http_server import RunningServer
from tests.support.served_store import served

pytestmark = pytest.mark.process

Json = dict[str, object]

HISTORY = tuple(f"{at}: {'Yes, and ' * 30}so on." for at in range(15))
SUMMARY = (f"Summary of what was said: {'it was yes, ' * 20}and so on. Go on.",)


def said(messages: tuple[str, ...]) -> Json:
    return body(spoken(messages), [])


def cached(reply: Json) -> tuple[int, int]:
    """Tokens of the prompt, and those of them that were read from the cache."""
    usage = reply["usage"]
    assert isinstance(usage, dict)
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def compacted(server: RunningServer) -> int:
    """Three turns after a long one, which begin with a summary of it; its prompt's tokens."""
    n_long, _ = cached(ask(server, said(HISTORY)))
    n_head, n_cached = cached(ask(server, said(SUMMARY)))
    assert 0 < n_cached < n_head < n_long / 4
    later: tuple[str, ...] = SUMMARY
    for at in range(2):
        later = (*later, text(ask(server, said(later))), f"And {at}?")
    return n_long


def test_what_was_compacted_is_restored_when_the_client_takes_it_back(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        n_long = compacted(server)
        first = ask(server, said((*HISTORY, "Well.", "Undone: go on.")))
        assert cached(first)[1] >= n_long - 8  # all but what opens the answer
    with served(tmp_path) as server:
        again = ask(server, said(SUMMARY))
        assert cached(again)[1] == cached(again)[0] - 1
        undone = ask(server, said((*HISTORY, "Well.", "Undone: go on.")))
        assert cached(undone)[1] == cached(undone)[0] - 1
        assert text(undone) == text(first)
