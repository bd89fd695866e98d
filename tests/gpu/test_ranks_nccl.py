"""One model on two ranks over NCCL, both on one GPU: what tests of ranks find over a ring."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import pytest

pytestmark = pytest.mark.process

_MODELS = (
    "tests/fleet/test_ranks_models.py::test_two_ranks_answer_as_one_device_and_after_a_restore"
)
_SECONDS = 400.0
_SERVER = "tests/fleet/test_ranks.py::test_"
CHECKS = {
    "answers": (f"{_MODELS}[llama]",),
    "answers in pages": tuple(
        f"{_MODELS}[{row} in pages]" for row in ("llama", "gpt_oss", "deepseek_v3")
    ),
    "contract": ("tests/fleet/test_ranks_contract.py", "-k", "not wide"),
    "contract in pages": ("tests/fleet/test_ranks_contract.py", "-k", "wide"),
    "restart": (f"{_SERVER}a_server_of_two_ranks_ends_in_good_order_and_resumes",),
    "eviction": (f"{_SERVER}an_agent_that_was_evicted_returns_from_memory",),
    "kill": (
        f"{_SERVER}the_other_ranks_end_with_a_reason_when_one_is_lost_in_a_turn",
        "-k",
        "not silent",
    ),
}


@pytest.mark.skipif(
    not (mx.cuda.is_available() and mx.distributed.is_available("nccl")), reason="NCCL needs CUDA"
)
@pytest.mark.parametrize("check", CHECKS)
def test_over_nccl_ranks_do_what_they_do_over_a_ring(check: str) -> None:
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CHECKS[check])
    over_nccl = {**os.environ, "SEMANTIC_RANKS": "nccl"}
    done = subprocess.run(
        command, env=over_nccl, capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    assert not done.returncode, done.stdout[-4000:]
