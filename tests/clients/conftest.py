"""Where the server is that a check talks to."""

from __future__ import annotations

import os
from typing import Final

import pytest

URL_VARIABLE: Final = "SEMANTIC_CHECK_URL"

SERVER_VARIABLE: Final = "SEMANTIC_CHECK_SERVER"
"""How a check starts servers of its own: a JSON list of the interpreter and its variables."""

PACKAGES_VARIABLE: Final = "SEMANTIC_CHECK_PACKAGES"
"""The folder with the packages of a client that runs in Node."""


@pytest.fixture(scope="session")
def url() -> str:
    """The started server's address, without a path."""
    return os.environ[URL_VARIABLE]
