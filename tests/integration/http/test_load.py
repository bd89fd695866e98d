"""A server in a process of its own, with clients who leave, a SIGKILL, and more agents than room.

The full shape is `benchmarks/server_load.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.server_client import Answer
from benchmarks.server_load import QUICK, Found, Load, Said, pool_for, read_metrics, violations
from semantic import load
from semantic.adapters.mlx.backend import MLXBackend
from semantic.adapters.mlx.text.tokenizer import MLXTokenizer


@pytest.fixture(scope="module")
def model() -> tuple[MLXBackend, MLXTokenizer]:
    return load()


@pytest.mark.process
@pytest.mark.long
def test_under_load_and_after_a_kill_every_answer_is_right_and_budgets_hold(
    model: tuple[MLXBackend, MLXTokenizer], tmp_path: Path
) -> None:
    one = Load(QUICK, tmp_path)
    found = one.run()
    share = one.cached_share(pool_for(*model, QUICK))
    one.check_answers(*model)
    assert violations(found, share) == []
    talked = QUICK.clients * QUICK.turns
    assert len(found.said) + found.left == talked + QUICK.agents * QUICK.rounds
    assert found.left > 0, "no client left in the middle of an answer"


@pytest.mark.process
def test_a_wrong_answer_is_noticed(model: tuple[MLXBackend, MLXTokenizer], tmp_path: Path) -> None:

    one = Load(QUICK, tmp_path)
    asked = ({"role": "user", "content": "What is 7 plus 5?"},)
    right, wrong = Answer(0.0, "7 plus 5 is 12."), Answer(0.0, "7 plus 5 is 13.")
    one.found.said += [Said(asked, right), Said(asked, wrong)]
    one.check_answers(*model)
    assert len(one.found.wrong) == 1


def test_everything_that_was_promised_is_checked() -> None:
    broken = Found(failures=["late"], over_budget={"pool"}, wrong=["13"])
    assert [line.partition(":")[0] for line in violations(broken, 0.5)] == [
        "failed",
        "wrong answer",
        "over budget",
        "0 answers and 0 looks at the server's figures",
        "no client was answered after the kill",
        "cached share 0.500",
    ]


def test_figures_are_read_with_their_tier() -> None:
    text = '# HELP a\na{model_name="x y"} 2.0\nb{tier="disk"} 1e3\n'
    assert read_metrics(text) == {"a": 2.0, 'b{tier="disk"}': 1000.0}
