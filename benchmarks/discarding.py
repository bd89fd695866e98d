"""An object store that keeps nothing: S3's protocol as far as uploads need it, in a process.

What a client takes to upload is as with any other; the server reads bodies and forgets them.
"""

from __future__ import annotations

import os
import socketserver
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "discarded"
_ROOM = 1 << 20
_ANSWERS = {
    "PUT": b'HTTP/1.1 200 OK\r\nETag: "none"\r\nContent-Length: 0\r\n\r\n',
    "DELETE": b"HTTP/1.1 204 No Content\r\n\r\n",
}
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class _Connection(socketserver.StreamRequestHandler):
    """Requests of one connection."""

    def handle(self) -> None:
        room = memoryview(bytearray(_ROOM))
        while line := self.rfile.readline():
            left = 0
            while (header := self.rfile.readline().strip().lower()) != b"":
                if header.startswith(b"content-length:"):
                    left = int(header.split(b":")[1])
                if header == b"expect: 100-continue":
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            while left and (n := self.rfile.readinto1(room[:left])):
                left -= n
            self.wfile.write(_ANSWERS.get(line.split(b" ")[0].decode(), _NOT_FOUND))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def discarding() -> Iterator[str]:
    """The URL of such an object store; its credentials are in the environment."""
    command = [sys.executable, "-m", "benchmarks.discarding"]
    with subprocess.Popen(  # noqa: S603 - our own command line
        command, stdout=subprocess.PIPE, text=True
    ) as server:
        if server.stdout is None:
            raise AssertionError("a pipe was asked for")
        port = int(server.stdout.readline())
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
            AWS_ACCESS_KEY_ID="none",
            AWS_SECRET_ACCESS_KEY="none",  # noqa: S106 - none is checked
            AWS_REGION="us-east-1",
        )
        try:
            yield f"s3://{BUCKET}"
        finally:
            server.terminate()


if __name__ == "__main__":
    with _Server(("127.0.0.1", 0), _Connection) as own:
        print(own.server_address[1], flush=True)
        own.serve_forever()
