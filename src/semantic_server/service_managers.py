"""Runs `semantic serve` as a service of the user: with systemd on Linux, with launchd on macOS."""

from __future__ import annotations

import os
import plistlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from semantic.domain.errors import InvalidRequestError, OperatorError


@dataclass(frozen=True, slots=True)
class Service:
    """The program that a service runs. The manager kills it `stop_seconds` after a stop request."""

    command: tuple[str, ...]
    stop_seconds: int


@dataclass(frozen=True, slots=True)
class ServiceState:
    """The state of this program's service. `log` is a command that shows the log. `starts_with` is
    the event that starts the service."""

    file: Path
    installed: bool
    running: bool
    log: str
    starts_with: str


class ServicePort(Protocol):
    """The service manager of one user: systemd or launchd."""

    def text(self, service: Service) -> str:
        """Return the service file's text. Raises InvalidRequestError for control characters."""

    def install(self, service: Service) -> bool:
        """Write the service's file and start the service. Returns True if the file changed.

        Restarts a running service whose file changed. Raises OperatorError if the file belongs to
        another program, or if the write or the start fails.
        """

    def uninstall(self) -> bool:
        """Stop the service and remove its file. Returns True if the file existed. Raises the same
        errors as `install`."""

    def state(self) -> ServiceState:
        """Return whether the service exists and runs."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a command: its exit code, stdout and stderr."""

    code: int
    printed: str


class HostPort(Protocol):
    """Operations of the machine that a service manager needs."""

    @property
    def system(self) -> str:
        """The name of the operating system, as in `sys.platform`."""

    @property
    def user_id(self) -> int:
        """The user's numeric id."""

    @property
    def home(self) -> Path:
        """The user's folder."""

    @property
    def config_home(self) -> Path:
        """The folder of the user's settings."""

    def run(self, command: Sequence[str]) -> Ended:
        """Run a command until it ends. If the program is missing, the exit code is 127."""

    def pause(self) -> None:
        """Wait for a moment."""


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


MARK: Final = "Written by `semantic service install`; `semantic service uninstall` removes it."
"""Text in every file that this module writes. A file without it belongs to another program."""


def read_file(path: Path) -> str | None:
    """Return the text of this program's file, or None if the file is missing. Raises OperatorError
    for another program's file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"cannot read {path}: {_reason(error)}") from error
    if MARK not in text:
        raise OperatorError(
            f"{path} is not a file of `semantic service install`: move it away first"
        )
    return text


def write_file(path: Path, text: str) -> bool:
    """Write `text` at `path` atomically. Returns True if the file changed. Raises OperatorError if
    the write fails or the file is another program's."""
    if read_file(path) == text:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except OSError:
            with suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {_reason(error)}") from error
    return True


def remove_file(path: Path) -> bool:
    """Remove this program's file. Returns True if it existed. Raises OperatorError on failure."""
    if read_file(path) is None:
        return False
    try:
        path.unlink()
    except OSError as error:
        raise OperatorError(f"cannot remove {path}: {_reason(error)}") from error
    return True


def require_printable(command: tuple[str, ...]) -> None:
    """Raise InvalidRequestError for a word that the service's file cannot contain."""
    for word in command:
        if not word.isprintable():
            raise InvalidRequestError(f"expected no control characters, got {word!r:.80}")


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


_UNIT: Final = "semantic.service"
_TEXT: Final = """\
# {mark}
[Unit]
Description=semantic: many LLM agents, one local model

[Service]
Type=exec
ExecStart={command}
WorkingDirectory=%h
Restart=on-failure
RestartSec=5
# A request or a setting that cannot be honoured is not mended by another start.
RestartPreventExitStatus=2 4
# The server alone gets the signal: it saves every agent, and ends its own processes.
KillMode=mixed
TimeoutStopSec={stop_seconds}
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


class Systemd:
    """Implements `ServicePort`."""

    def __init__(self, host: HostPort) -> None:
        self._host = host
        self._file = host.config_home / "systemd" / "user" / _UNIT

    @staticmethod
    def is_here(host: HostPort) -> bool:
        """Return whether systemd runs for this user."""
        return _systemctl(host, "show-environment").code == 0

    def text(self, service: Service) -> str:
        require_printable(service.command)
        words = map(_quoted, service.command)
        return _TEXT.format(mark=MARK, command=" ".join(words), stop_seconds=service.stop_seconds)

    def install(self, service: Service) -> bool:
        changed = write_file(self._file, self.text(service))
        self._require("daemon-reload")
        self._require("enable", _UNIT)
        self._require("restart" if changed else "start", _UNIT)
        return changed

    def uninstall(self) -> bool:
        if read_file(self._file) is None:
            return False
        self._require("disable", "--now", _UNIT)
        removed = remove_file(self._file)
        self._require("daemon-reload")
        return removed

    def state(self) -> ServiceState:
        return ServiceState(
            self._file,
            installed=read_file(self._file) is not None,
            running=_systemctl(self._host, "is-active", _UNIT).code == 0,
            log=f"journalctl --user --unit {_UNIT} --follow",
            starts_with="your login; `loginctl enable-linger` starts it with the machine",
        )

    def _require(self, *arguments: str) -> None:
        ended = _systemctl(self._host, *arguments)
        if ended.code != 0:
            words = " ".join(arguments)
            raise OperatorError(f"systemctl --user {words} failed: {ended.printed}")


def _systemctl(host: HostPort, *arguments: str) -> Ended:
    return host.run(("systemctl", "--user", *arguments))


def _quoted(word: str) -> str:
    """Quote a word for a unit's file. systemd then expands nothing in the word."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, plain)
    return f'"{word}"'


_LABEL: Final = "semantic-engine.serve"
_END_OF_HEAD: Final = "<plist version"
_BETWEEN_STARTS: Final = 30
"""Seconds between starts: launchd restarts a failed program forever."""
_MOST_PAUSES: Final = 600
"""The maximum number of pauses to wait until a service stops."""


class Launchd:
    """Implements `ServicePort`."""

    def __init__(self, host: HostPort) -> None:
        self._host = host
        self._file = host.home / "Library" / "LaunchAgents" / f"{_LABEL}.plist"
        self._log = host.home / "Library" / "Logs" / "semantic" / "serve.log"
        self._domain = f"gui/{host.user_id}"

    @staticmethod
    def is_here(host: HostPort) -> bool:
        """Return whether launchd runs for this user."""
        return _launchctl(host, "print", f"gui/{host.user_id}").code == 0

    def text(self, service: Service) -> str:
        require_printable(service.command)
        content = {
            "Label": _LABEL,
            "ProgramArguments": list(service.command),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _BETWEEN_STARTS,
            "ExitTimeOut": service.stop_seconds,
            "StandardOutPath": str(self._log),
            "StandardErrorPath": str(self._log),
            "WorkingDirectory": str(self._host.home),
            "Umask": 0o077,
        }
        text = plistlib.dumps(content, sort_keys=False).decode("utf-8")
        return text.replace(_END_OF_HEAD, f"<!-- {MARK} -->\n{_END_OF_HEAD}", 1)

    def install(self, service: Service) -> bool:
        self._make_log_folder()
        changed = write_file(self._file, self.text(service))
        if changed:
            self._stop()
        if not self._is_loaded():
            self._require("enable", f"{self._domain}/{_LABEL}")
            self._require("bootstrap", self._domain, str(self._file))
        return changed

    def uninstall(self) -> bool:
        if read_file(self._file) is None:
            return False
        self._stop()
        return remove_file(self._file)

    def state(self) -> ServiceState:
        ended = _launchctl(self._host, "print", f"{self._domain}/{_LABEL}")
        return ServiceState(
            self._file,
            installed=read_file(self._file) is not None,
            running=ended.code == 0 and "state = running" in ended.printed,
            log=f"tail -f '{self._log}'",
            starts_with="your login",
        )

    def _make_log_folder(self) -> None:
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OperatorError(f"cannot make {self._log.parent}: {error.strerror}") from error

    def _is_loaded(self) -> bool:
        return _launchctl(self._host, "print", f"{self._domain}/{_LABEL}").code == 0

    def _stop(self) -> None:
        """Stop the service and wait until launchd has unloaded it. An earlier start would fail."""
        if not self._is_loaded():
            return
        _launchctl(self._host, "bootout", f"{self._domain}/{_LABEL}")
        for _ in range(_MOST_PAUSES):
            if not self._is_loaded():
                return
            self._host.pause()
        raise OperatorError(f"launchctl bootout {self._domain}/{_LABEL} did not finish")

    def _require(self, *arguments: str) -> None:
        ended = _launchctl(self._host, *arguments)
        if ended.code != 0:
            raise OperatorError(f"launchctl {' '.join(arguments)} failed: {ended.printed}")


def _launchctl(host: HostPort, *arguments: str) -> Ended:
    return host.run(("launchctl", *arguments))
