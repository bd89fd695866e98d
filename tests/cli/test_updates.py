"""`--check-updates` asks the index of pip or uv; nothing else in the program does."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import util
from pathlib import Path
from threading import Thread

import pytest

from semantic import __version__
from tests.cli.support import semantic

PACKAGE = "semantic_engine"
pytestmark = pytest.mark.process


class Index(SimpleHTTPRequestHandler):
    """A folder with a file for each version, as an index serves them."""

    asked: list[str] = []  # noqa: RUF012  of all handlers of a test

    def log_message(self, *_: object) -> None:
        self.asked.append(self.path)


@pytest.fixture(params=["pip", "uv"])
def index(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder of the package, below an index that both tools ask."""
    folder = tmp_path / "simple" / "semantic-engine"
    folder.mkdir(parents=True)
    Index.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Index, directory=str(tmp_path)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": url, "PIP_NO_CACHE_DIR": "1",
        "UV_NO_CONFIG": "1", "UV_DEFAULT_INDEX": url, "UV_NO_CACHE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    program = tmp_path / "tools" / "semantic-engine"  # as uv calls the folder of a tool
    program.parent.mkdir()
    program.symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "executable", str(program / "bin" / "python"))
    monkeypatch.setenv("PATH", str(program / "bin"), prepend=os.pathsep)
    if request.param == "uv":
        found = util.find_spec
        monkeypatch.setattr(util, "find_spec", lambda name: None if name == "pip" else found(name))
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


def publish(folder: Path, version: str) -> None:
    about = f"Metadata-Version: 2.1\nName: semantic-engine\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{PACKAGE}-{version}-py3-none-any.whl", "w") as file:
        for name, text in {"METADATA": about, "WHEEL": wheel, "RECORD": ""}.items():
            file.writestr(f"{PACKAGE}-{version}.dist-info/{name}", text)


def test_the_newest_version_of_the_users_own_index_is_printed(index: Path) -> None:
    for version in ("0.9.0", "0.10.2", "0.11.0rc1"):
        publish(index, version)
    ran = semantic("--check-updates")
    assert (ran.code, ran.out, ran.err) == (
        0, f"semantic {__version__}; the newest is 0.10.2\n", ""
    )  # fmt: skip
    assert any("semantic-engine" in path for path in Index.asked)


def test_an_index_without_the_package_is_an_error_and_no_traceback(index: Path) -> None:
    index.rmdir()
    ran = semantic("--check-updates")
    assert (ran.code, ran.out) == (4, "")
    assert ran.err.startswith("error: cannot find the newest version: ")
    assert ran.err.endswith("configure the index of pip or uv\n")


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("words", [["--version"], ["agents", "ls"], ["run", "Hello!"]])
def test_without_the_option_nothing_asks(words: list[str]) -> None:
    assert semantic(*words).code == 0
    assert Index.asked == []
