"""A model hub on this machine: the routes that huggingface_hub reads and downloads a model with.

Large files are sent from a second address, as the real hub redirects to its content network.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs

import pytest

COMMIT = "a" * 40


@dataclass
class Hub:
    """The models of a hub by id and path, and what was asked of it."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commit: str = COMMIT
    corrupt: set[str] = field(default_factory=set)
    """Paths whose bytes arrive with another content of the same size."""
    said: dict[str, dict[str, object]] = field(default_factory=dict)
    """What is said of files instead of what is so."""
    without_ranges: bool = False
    ranges: list[str | None] = field(default_factory=list)
    """The Range header of each request for a large file."""
    authorizations: list[str | None] = field(default_factory=list)
    """The Authorization header of each request at the second address."""
    url: str = ""
    content_url: str = ""

    def restart(self) -> None:
        """Forget all models and requests."""
        fresh = Hub(url=self.url, content_url=self.content_url)
        self.__dict__.update(fresh.__dict__)

    def add(self, hub_id: str, folder: Path) -> None:
        """Offer the files of a folder as a model."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.models[hub_id] = {".gitattributes": b"*.safetensors filter=lfs\n", **files}


def use_hub(patch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Let huggingface_hub find the hub at `url`, and keep its cache in `cache`."""
    patch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    patch.delenv("HF_TOKEN", raising=False)


def is_large(path: str) -> bool:
    """Whether the hub keeps a file by its SHA-256."""
    return path.endswith(".safetensors")


def name_of(path: str, data: bytes) -> str:
    """The hash that names a file in the cache."""
    if is_large(path):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without models, on free ports."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.url, hub.content_url = (f"http://127.0.0.1:{one.server_port}" for one in servers)
    threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its own name
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("content/"):
            self._send_content(path.removeprefix("content/"))
        elif path == "api/models":
            self._send_found(parse_qs(self.path.partition("?")[2]))
        elif path.startswith("api/models/"):
            self._send_api(path.removeprefix("api/models/"))
        else:
            self._send_file(path)

    def _send_found(self, asked: dict[str, list[str]]) -> None:
        """Models with the words in their ids; those asked for by `filter=mlx` alone."""
        words = " ".join(asked.get("search", [])).lower().split()
        found = [
            {"id": one, "downloads": 100 - at, "lastModified": "2026-10-01T00:00:00.000Z"}
            for at, one in enumerate(self.state.models)
            if all(word in one.lower() for word in words) and asked.get("filter") == ["mlx"]
        ]
        self._reply(200, json.dumps(found[: int(asked["limit"][0])]).encode())

    def _send_api(self, path: str) -> None:
        hub_id = "/".join(path.split("/")[:2])
        files = self.state.models.get(hub_id)
        if files is None:
            self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in path:
            tree = [self._entry(name, data) for name, data in files.items()]
            self._reply(200, json.dumps(tree).encode())
        else:
            info = {"id": hub_id, "sha": self.state.commit, "siblings": []}
            self._reply(200, json.dumps(info).encode())

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data)}
        if is_large(name):
            large = {"oid": name_of(name, data), "size": len(data), "pointerSize": 130}
            entry |= {"oid": "0" * 40, "lfs": large}
        else:
            entry |= {"oid": name_of(name, data)}
        return entry | self.state.said.get(name, {})

    def _send_file(self, path: str) -> None:
        org, name, _, _, file = [*path.split("/", 4), "", "", ""][:5]
        data = self.state.models.get(f"{org}/{name}", {}).get(file)
        if data is None:
            self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        headers = {"X-Repo-Commit": self.state.commit, "ETag": f'"{name_of(file, data)}"'}
        if not is_large(file):
            self._reply(200, data, headers)
            return
        large = {
            "X-Linked-ETag": headers["ETag"],
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.state.content_url}/content/{org}/{name}/{file}",
        }
        self._reply(302, b"", headers | large)

    def _send_content(self, path: str) -> None:
        org, name, file = path.split("/", 2)
        data = self.state.models[f"{org}/{name}"][file]
        if file in self.state.corrupt:
            data = bytes(len(data))
        wanted = self.headers.get("Range")
        if self.command == "GET":
            self.state.ranges.append(wanted)
            self.state.authorizations.append(self.headers.get("Authorization"))
        if wanted is None or self.state.without_ranges:
            self._reply(200, data)
            return
        begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        of_whole = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._reply(206, data[begin:], {"Content-Range": of_whole})

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
