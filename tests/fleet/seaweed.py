"""A SeaweedFS server of one process: S3 with keys, on free ports of this machine.

`python -m tests.fleet.seaweed COMMAND ...` runs a command beside one; SEMANTIC_WEED is the path of
the program `weed`, which `make test-fleet` installs in `.fleet`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import obstore

from semantic_fleet.objects.objects import Objects, UnavailableError

PROGRAM: Final = "SEMANTIC_WEED"
"""The environment variable with the path of the program."""
KEY, SECRET = "fleet-key", "fleet-secret-key"
BUCKET: Final = "agents"
_SECONDS: Final = 30.0


class Seaweed:
    """A server with its data in `folder`, which survives `stop`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = _free_ports(4)
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        actions = ["Admin", "Read", "Write", "List"]
        identity = {
            "name": "fleet",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": actions,
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def environment(self) -> dict[str, str]:
        """What a client of it needs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    @property
    def port(self) -> int:
        """Of the S3 server."""
        return self._ports[3]

    def start(self, *flags: str) -> None:
        """Return when an object can be written and read."""
        master, volume, filer, s3 = map(str, self._ports)
        command = [
            os.environ[PROGRAM], "server", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}", "-filer",
            f"-filer.port={filer}", "-s3", f"-s3.port={s3}",
            f"-s3.config={self._folder / 's3.json'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0",
            "-master.volumeSizeLimitMB=64", "-volume.max=20", *flags,
        ]  # fmt: skip
        log = (self._folder / "log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        self._wait(filer)

    def stop(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        """Answer nothing more, with all connections open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _wait(self, filer: str) -> None:
        until = time.monotonic() + _SECONDS
        while True:
            try:
                url = f"http://127.0.0.1:{filer}/buckets/{BUCKET}/"
                made = urllib.request.Request(url, method="POST")
                with suppress(urllib.error.HTTPError):  # it is there
                    urllib.request.urlopen(made, timeout=2).close()
                probe = Objects.open(f"s3://{BUCKET}")
                probe.create("probe", b"here")
                probe.get("probe")
            except (OSError, UnavailableError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
            else:
                return


def paths_of(objects: Objects) -> list[str]:
    """All objects."""
    return [one["path"] for page in obstore.list(objects._small) for one in page]


def until_uploaded(objects: Objects) -> None:
    """Return when nothing new was uploaded for a second."""
    before = -1
    while (n := len(paths_of(objects))) != before or n < 8:
        before = n
        time.sleep(1)


def _free_ports(n: int) -> list[int]:
    """Ports below 32768, whose gRPC ports, 10,000 higher, are free too."""
    found: list[int] = []
    for port in range(15000 + os.getpid() % 5000, 32000, 7):
        if all(_is_free(one) for one in (port, port + 10_000)):
            found.append(port)
        if len(found) == n:
            return found
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0


def main(command: list[str]) -> int:
    """Run `command` with the environment of a server, and return its status."""
    with TemporaryDirectory(prefix="semantic-weed-") as folder:
        server = Seaweed(Path(folder))
        os.environ.update(server.environment, SEMANTIC_REMOTE_STORE=f"s3://{BUCKET}/run")
        server.start()
        try:
            return subprocess.run(command, check=False).returncode
        finally:
            server.stop()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
