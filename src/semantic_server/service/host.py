"""This machine for `HostPort`. Knows no manager of services."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from semantic_server.service.service_port import Ended

_NOT_FOUND = 127
_PAUSE_SECONDS = 0.2
_LONGEST_SECONDS = 120


class Host:
    """Implements `HostPort`."""

    @property
    def system(self) -> str:
        return sys.platform

    @property
    def user_id(self) -> int:
        return os.getuid()

    @property
    def home(self) -> Path:
        return Path.home()

    @property
    def config_home(self) -> Path:
        given = os.environ.get("XDG_CONFIG_HOME", "")
        return Path(given) if given.startswith("/") else self.home / ".config"

    def run(self, command: Sequence[str]) -> Ended:
        try:
            done = subprocess.run(  # noqa: S603  # no shell, and no text of a request
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_LONGEST_SECONDS,
            )
        except FileNotFoundError:
            return Ended(_NOT_FOUND, f"{command[0]}: not found")
        except subprocess.TimeoutExpired:
            return Ended(_NOT_FOUND, f"{command[0]} did not end within {_LONGEST_SECONDS} seconds")
        return Ended(done.returncode, (done.stdout.strip() or done.stderr.strip()))

    def pause(self) -> None:
        time.sleep(_PAUSE_SECONDS)
