"""Through the server, an answer has the same log-probabilities alone and beside others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from tests.support.http_server import RunningServer
from tests.support.served_store import served

N_CLIENTS = 6

Json = dict[str, object]


def answer(server: RunningServer, number: int) -> Json:
    """The answer to prompt `number`, of its own length, with log-probabilities."""
    body = {
        "model": "default",
        "prompt": f"Question {number}: " + "tell me more. " * (1 + 3 * number),
        "max_tokens": 64,
        "ignore_eos": True,
        "logprobs": 2,
    }
    return server.ask("POST", "/v1/completions", body).json


def said(reply: Json) -> object:
    (choice,) = cast("list[Json]", reply["choices"])
    found = cast(Json, choice["logprobs"])["token_logprobs"]
    assert len(cast("list[float]", found)) == 64
    return found


@pytest.mark.process
def test_an_answer_depends_on_no_other_request(tmp_path: Path) -> None:
    with served(tmp_path, exact_batch="on") as server:
        model = cast("Json", server.ask("GET", "/v1/models/default").json["capabilities"])
        assert cast(Json, model["exact_batch"])["problem"] == ""
        for number in range(N_CLIENTS):  # from now on, all prompts are cached
            answer(server, number)
        alone = [answer(server, number) for number in range(N_CLIENTS)]
        usage = cast(Json, alone[0]["usage"])
        assert cast(Json, usage["semantic"])["exact_batch"] is True
        with ThreadPoolExecutor(N_CLIENTS) as clients:
            together = list(clients.map(lambda number: answer(server, number), range(N_CLIENTS)))
        assert [said(one) for one in together] == [said(one) for one in alone]


@pytest.mark.process
def test_a_server_says_why_an_answer_may_depend_on_others(tmp_path: Path) -> None:
    with served(tmp_path, exact_batch="off") as server:
        model = cast("Json", server.ask("GET", "/v1/models/default").json["capabilities"])
        assert cast(Json, model["exact_batch"])["problem"] == "--exact-batch is off"
        usage = cast(Json, answer(server, 0)["usage"])
        assert cast(Json, usage["semantic"])["exact_batch"] is False
