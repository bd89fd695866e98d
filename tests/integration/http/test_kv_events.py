"""A server that publishes KV cache events: a router knows which of its tokens are stored."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.kv_subscriber import BlockStored, Subscriber
from tests.support.served_store import served

pytestmark = pytest.mark.process

WORDS = "The quick brown fox jumps over the lazy dog. " * 60


def test_a_router_knows_the_tokens_that_an_answer_stored(tmp_path: Path) -> None:
    """They are those that `/tokenize` has for the same prompt, by which routers look them up."""
    asked = {"model": "default", "messages": [{"role": "user", "content": WORDS}]}
    with tempfile.TemporaryDirectory() as short:  # a socket's path has at most 107 bytes
        endpoint = f"ipc://{short}/events"
        with served(tmp_path, events=(endpoint, "")) as server, closing(Subscriber(endpoint)) as it:
            tokens = server.ask("POST", "/tokenize", asked).json["tokens"]
            assert isinstance(tokens, list)
            answer = server.ask("POST", "/v1/chat/completions", {**asked, "max_tokens": 3})
            assert answer.status == 200
            n_whole = len(tokens) // 256
            assert n_whole >= 2
            while min(map(len, it.held.values())) < n_whole:
                it.read()
    known: dict[int | bytes, list[int]] = {}
    for event in it.events:
        assert isinstance(event, BlockStored)
        for n, name in enumerate(event.block_hashes):
            known[name] = event.token_ids[256 * n : 256 * n + 256]
    assert [token for one in known.values() for token in one] == tokens[: 256 * n_whole]
