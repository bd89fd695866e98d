"""A process without a network: only what runs beside it can be reached."""

from __future__ import annotations

import fcntl
import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence
from typing import Final

_GET_FLAGS: Final = 0x8913
_SET_FLAGS: Final = 0x8914
_UP: Final = 1
_REQUEST: Final = "16sh22x"

NOWHERE: Final = {
    **dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
        "http://127.0.0.1:9",
    ),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
}
"""Variables that lead all but loopback to a port without a listener."""


def without_network() -> Sequence[str]:
    """What to put before a command so that it has loopback alone, not up yet; nothing where the
    system does not allow that."""
    unshare = shutil.which("unshare")
    for flags in ("--net",), ("--map-root-user", "--net"):
        if unshare is None:
            break
        tried = subprocess.run((unshare, *flags, "true"), capture_output=True, check=False)
        if tried.returncode == 0:
            return (unshare, *flags, "--")
    return ()


def raise_loopback() -> None:
    """Bring loopback up, in a network of this process's own. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack(_REQUEST, b"lo", 0)
        _, flags = struct.unpack(_REQUEST, fcntl.ioctl(any_socket, _GET_FLAGS, asked))
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_REQUEST, b"lo", flags | _UP))
