"""A model of two ranks is a `BatchBackend` like any other: the contract's own tests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest

from semantic.adapters.mlx.ranks.leading import LeadingBackend
from semantic.ports.generation import BatchBackend
from tests.contract import test_batch_backend as contract
from tests.support.in_pages import SUFFIX
from tests.support.rig import cache_bytes
from tests.support.two_ranks import WIDE, pair

pytestmark = pytest.mark.process
globals().update({name: one for name, one in vars(contract).items() if name.startswith("test_")})

_ARCHITECTURE = "llama"


@pytest.fixture(scope="module", params=[_ARCHITECTURE, WIDE + _ARCHITECTURE + SUFFIX])
def backend(request: pytest.FixtureRequest) -> LeadingBackend:
    return pair().model(request.param)


@pytest.fixture(params=[f"mlx {_ARCHITECTURE}"])
def subject(request: pytest.FixtureRequest, backend: LeadingBackend) -> Iterator[contract.Subject]:
    if request.param != f"mlx {_ARCHITECTURE}":
        pytest.skip("of another model")
    made = contract.Subject(cast("BatchBackend", backend), partial(cache_bytes, backend))
    yield made
    made.pool.check_integrity()
    for sequence in [*backend._sequences]:  # the model is shared by all tests
        backend.close(sequence)
