"""A service of the user under systemd. Knows units and systemctl."""

from __future__ import annotations

from typing import Final

from semantic.domain.errors import OperatorError
from semantic_server.service import unit_file
from semantic_server.service.service_port import Ended, HostPort, Service, ServiceState

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
        """Whether systemd runs for this user."""
        return _systemctl(host, "show-environment").code == 0

    def text(self, service: Service) -> str:
        unit_file.require_printable(service.command)
        words = map(_quoted, service.command)
        return _TEXT.format(
            mark=unit_file.MARK, command=" ".join(words), stop_seconds=service.stop_seconds
        )

    def install(self, service: Service) -> bool:
        changed = unit_file.write(self._file, self.text(service))
        self._require("daemon-reload")
        self._require("enable", _UNIT)
        self._require("restart" if changed else "start", _UNIT)
        return changed

    def uninstall(self) -> bool:
        if unit_file.read(self._file) is None:
            return False
        self._require("disable", "--now", _UNIT)
        removed = unit_file.remove(self._file)
        self._require("daemon-reload")
        return removed

    def state(self) -> ServiceState:
        return ServiceState(
            self._file,
            installed=unit_file.read(self._file) is not None,
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
    """A word of a command, as a unit's line has it: nothing in it is expanded."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, plain)
    return f'"{word}"'
