"""The model with four bits and dequantised; a test that takes `subject` runs with both."""

from __future__ import annotations

import pytest

from experiments import subjects


@pytest.fixture(scope="session", params=subjects.REAL)
def subject(request: pytest.FixtureRequest) -> subjects.Subject:
    """Raises ModelNotFoundError where it has not been fetched."""
    return subjects.load(str(request.param))
