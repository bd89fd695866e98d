"""Loads OpenBLAS before any test imports MLX; without it the suite takes many times as long.

Selects the tests of a lane. Each test has a store folder of its own and never sees the user's. It
reads what is stored however slow the machine is, and is charged with what it leaves open.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: each waits for the others if all of them compute with all cores.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# On CUDA products in float32 would be computed with ten bits of mantissa, and tokens be other ones
# where the shapes of two batches differ.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

from tests.support import lanes, leaks
from tests.support.always_read import always_read

if lanes.QUICK:
    lanes.forbid_mlx()
else:
    if lanes.WITHOUT_OPENBLAS:
        import mlx.core  # noqa: F401  comes first: OpenBLAS is too late then
    import semantic.adapters.mlx  # noqa: F401

# Each run tries the same examples, so a failure is the change's own; the thorough profile draws new
# ones.
hypothesis.settings.register_profile(
    "default",
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    derandomize=True,
    max_examples=25,
    print_blob=True,
)
hypothesis.settings.register_profile(
    "thorough",
    parent=hypothesis.settings.get_profile("default"),
    derandomize=False,
    max_examples=500,
)
hypothesis.settings.register_profile(
    "quick", parent=hypothesis.settings.get_profile("default"), max_examples=20
)
hypothesis.settings.load_profile(lanes.PROFILE)

# A suite in the background may be started with Ctrl-C ignored, and our programs would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

_MEMORY = Path("/dev/shm")
_ROOM = 4 << 30
_tests = itertools.count()

# The only contract that is kept by MLX's tokenizers alone.
collect_ignore = ["contract/test_chat_format.py"] if lanes.QUICK else []


def pytest_configure(config: pytest.Config) -> None:
    """Watch for what tests leave open, and keep their folders in memory where there is room.

    A store waits for the disk whenever it flushes.
    """
    config.pluginmanager.register(leaks, "leaks")
    if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are called by their parameter's name: compressed ones hold the second of their making.

    The processes of a lane would collect tests of different names.
    """
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A stored prefix is always read, except by tests of the policy that compares costs."""
    if item.get_closest_marker("measured_reads") is not None:
        return (yield)
    with always_read():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and their modules, some 600,000 objects, are exempt from collections of garbage.

    Each collection that looked at them would take a quarter of a second, in many tests more than
    once.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The deterministic lane does not import modules of which it would run nothing.

    They import clients and frameworks that nothing else needs.
    """
    if config.option.markexpr != "not process" or not collection_path.is_file():
        return None
    return lanes.is_apart(collection_path) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what another lane runs; the longest tests come first.

    One that began last would keep a single process while the others have nothing left.
    """
    deselected = [item for item in items if lanes.left_out(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not lanes.left_out(item)]
    for item in items:
        if lanes.is_exact(item):
            item.add_marker("exact")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_sessionfinish() -> None:
    """The quick lane has not imported MLX, not even where nothing noticed."""
    assert not (lanes.QUICK and lanes.loaded_mlx()), lanes.loaded_mlx()


@pytest.fixture(autouse=True, scope="module")
def fastapi_caches() -> Iterator[None]:
    """What FastAPI remembers of endpoints is forgotten: it would keep every app, some 20,000
    objects each, and a collection of garbage look at all of them."""
    yield
    models = sys.modules.get("fastapi.dependencies.models")
    for remembered in vars(models).values() if models else ():
        if isinstance(remembered, functools._lru_cache_wrapper):
            remembered.cache_clear()


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
    """This test's folder, with a place for the store, for what is known of models, and for the
    user's settings."""
    own = homes / str(next(_tests))
    own.mkdir()
    monkeypatch.setenv("SEMANTIC_STORE", str(own / "store"))
    monkeypatch.setenv("SEMANTIC_CACHE", str(own / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own / "config"))
    return own
