"""The files of the page: which are served, how, and what is not in them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from semantic_server.http import app
from semantic_server.http.app import FILES, HEADERS
from semantic_server.http.settings import ServerSettings
from tests.support.fake_serving import FakeServing
from tests.support.http_server import RunningServer, running

FOLDER = Path(app.__file__).parent / "page" / "static"
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setHTML"
    r"|createContextualFragment|DOMParser|javascript:|srcdoc|localStorage|\sstyle=|\son\w+=\""
)
ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")
NAMESPACE = "http://www.w3.org"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    settings = ServerSettings(api_keys=(SecretStr("a key"),))
    with running(FakeServing(), settings) as found:
        yield found


@pytest.mark.process
@pytest.mark.parametrize("path", FILES)
def test_a_file_is_served_without_a_key(server: RunningServer, path: str) -> None:
    name, media_type = FILES[path]
    reply = server.ask("GET", path)
    assert (reply.status, reply.body.decode()) == (200, TEXTS[name])
    assert reply.headers["content-type"].partition(";")[0] == media_type
    assert {name: reply.headers[name] for name in HEADERS} == HEADERS
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    head = server.ask("HEAD", path)
    assert (head.status, head.body, head.headers["etag"]) == (200, b"", reply.headers["etag"])


@pytest.mark.process
def test_a_file_that_the_client_has_is_not_sent_again(server: RunningServer) -> None:
    etag = server.ask("GET", "/").headers["etag"]
    again = server.ask("GET", "/", headers={"if-none-match": f'"other", W/{etag}'})
    assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
    assert server.ask("GET", "/", headers={"if-none-match": '"other"'}).status == 200


@pytest.mark.process
@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/../assets.py", "/page/%2e%2e/assets.py"]
)
def test_nothing_else_is_served(server: RunningServer, path: str) -> None:
    assert server.ask("GET", path).status == 401
    assert server.ask("GET", path, headers={"x-api-key": "a key"}).status == 404


def test_every_file_is_served_and_every_one_that_is_named_exists() -> None:
    assert {name for name, _ in FILES.values()} == TEXTS.keys()
    for text in TEXTS.values():
        imported = re.findall(r'from "\./([^"]+)"|import "\./([^"]+)"|"/page/([^"]+)"', text)
        assert {name for names in imported for name in names if name} <= TEXTS.keys()


@pytest.mark.parametrize("name", TEXTS)
def test_no_file_makes_elements_of_texts_or_loads_from_elsewhere(name: str) -> None:
    assert UNSAFE.findall(TEXTS[name]) == []
    assert set(ADDRESS.findall(TEXTS[name])) <= {NAMESPACE}


@pytest.mark.parametrize("text", ["node.innerHTML = x", '<p style="a">', '<b onclick="x">'])
def test_an_unsafe_text_is_recognised(text: str) -> None:
    assert UNSAFE.search(text)


def test_the_wheel_has_whatever_is_below_the_package() -> None:
    root = Path(__file__).parents[4]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = sorted(f"src/{folder.name}" for folder in (root / "src").iterdir())
    assert wheel["targets"]["wheel"] == {"packages": packages}
    assert FOLDER.is_relative_to(root / "src" / "semantic_server")
