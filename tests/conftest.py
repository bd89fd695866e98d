"""Loads OpenBLAS before any test imports MLX; without it the suite takes many times as long.

No test may see or touch the folders of whoever runs it: each has a store of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: each waits for the others if all of them compute with all cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import semantic.adapters.mlx  # noqa: F401

# Everybody who runs the suite tries the same examples, so a failure is the change's own. Whoever
# looks for new ones sets HYPOTHESIS_PROFILE=thorough.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    derandomize=True,
    max_examples=40,
    print_blob=True,
)
hypothesis.settings.register_profile(
    "thorough",
    parent=hypothesis.settings.get_profile("default"),
    derandomize=False,
    max_examples=500,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Whoever starts the suite in the background may ignore Ctrl-C, and our programs would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_tests = itertools.count()


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the folders of all tests are."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """Loggers are as before when a test has sent them somewhere."""
    loggers = [logging.getLogger(name) for name in ("semantic", "uvicorn.error")]
    before = [(one.handlers, one.propagate, one.level, one.filters[:]) for one in loggers]
    yield
    for one, (handlers, propagate, level, filters) in zip(loggers, before, strict=True):
        one.handlers, one.propagate, one.filters = handlers, propagate, filters
        one.setLevel(level)


@pytest.fixture(autouse=True)
def home(homes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This test's folder, with a place for the store and for what is known of models."""
    own = homes / str(next(_tests))
    own.mkdir()
    monkeypatch.setenv("SEMANTIC_STORE", str(own / "store"))
    monkeypatch.setenv("SEMANTIC_CACHE", str(own / "cache"))
    return own
