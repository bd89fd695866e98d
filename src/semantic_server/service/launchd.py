"""A service of the user under launchd. Knows property lists and launchctl."""

from __future__ import annotations

import plistlib
from typing import Final

from semantic.domain.errors import OperatorError
from semantic_server.service import unit_file
from semantic_server.service.service_port import Ended, HostPort, Service, ServiceState

_LABEL: Final = "semantic-engine.serve"
_END_OF_HEAD: Final = "<plist version"
_BETWEEN_STARTS: Final = 30
"""Seconds: launchd starts a program again also after a failure that it cannot mend."""
_MOST_PAUSES: Final = 600
"""While a service stops and saves its agents."""


class Launchd:
    """Implements `ServicePort`."""

    def __init__(self, host: HostPort) -> None:
        self._host = host
        self._file = host.home / "Library" / "LaunchAgents" / f"{_LABEL}.plist"
        self._log = host.home / "Library" / "Logs" / "semantic" / "serve.log"
        self._domain = f"gui/{host.user_id}"

    @staticmethod
    def is_here(host: HostPort) -> bool:
        """Whether launchd runs for this user."""
        return _launchctl(host, "print", f"gui/{host.user_id}").code == 0

    def text(self, service: Service) -> str:
        unit_file.require_printable(service.command)
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
        return text.replace(_END_OF_HEAD, f"<!-- {unit_file.MARK} -->\n{_END_OF_HEAD}", 1)

    def install(self, service: Service) -> bool:
        self._make_log_folder()
        changed = unit_file.write(self._file, self.text(service))
        if changed:
            self._stop()
        if not self._is_loaded():
            self._require("enable", f"{self._domain}/{_LABEL}")
            self._require("bootstrap", self._domain, str(self._file))
        return changed

    def uninstall(self) -> bool:
        if unit_file.read(self._file) is None:
            return False
        self._stop()
        return unit_file.remove(self._file)

    def state(self) -> ServiceState:
        ended = _launchctl(self._host, "print", f"{self._domain}/{_LABEL}")
        return ServiceState(
            self._file,
            installed=unit_file.read(self._file) is not None,
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
        """Returns when launchd has none of it: before, another start would be refused."""
        if not self._is_loaded():
            return
        _launchctl(self._host, "bootout", f"{self._domain}/{_LABEL}")
        for _ in range(_MOST_PAUSES):
            if not self._is_loaded():
                return
            self._host.pause()
        raise OperatorError(f"launchctl bootout {self._domain}/{_LABEL} does not end")

    def _require(self, *arguments: str) -> None:
        ended = _launchctl(self._host, *arguments)
        if ended.code != 0:
            raise OperatorError(f"launchctl {' '.join(arguments)} failed: {ended.printed}")


def _launchctl(host: HostPort, *arguments: str) -> Ended:
    return host.run(("launchctl", *arguments))
