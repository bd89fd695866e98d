"""A model of two ranks is a `BatchBackend` like any other: the contract's own tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

from semantic.ports.outbound import BatchBackend
from tests.contract import test_batch_backend as contract
from tests.support.two_ranks import ARCHITECTURE, leading_backend

globals().update({name: one for name, one in vars(contract).items() if name.startswith("test_")})


@pytest.fixture(params=[f"mlx {ARCHITECTURE}"])
def subject(request: pytest.FixtureRequest) -> Iterator[contract.Subject]:
    if request.param != f"mlx {ARCHITECTURE}":
        pytest.skip("of another model")
    backend = leading_backend()
    made = contract.Subject(cast("BatchBackend", backend), backend.cache_nbytes)
    yield made
    made.pool.check_integrity()
    for sequence in [*backend._sequences]:  # the model is shared by all tests
        backend.close(sequence)
