"""What `semantic service` asks of the machine: a program that runs whenever the user does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Service:
    """The program that is run. It gets `stop_seconds` to end before it is killed."""

    command: tuple[str, ...]
    stop_seconds: int


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the manager of services has of this program.

    `log` and `starts_with` are for the person: the command that shows the log, and what starts the
    service.
    """

    file: Path
    installed: bool
    running: bool
    log: str
    starts_with: str


class ServicePort(Protocol):
    """A manager of services of one user: systemd or launchd."""

    def text(self, service: Service) -> str:
        """The file's text for this service. Raises InvalidRequestError for control characters."""
        ...

    def install(self, service: Service) -> bool:
        """Write the file and start the service; whether the file changed.

        One that runs with another text is restarted, one that runs with this text is left alone.
        The file has the old text or the new one, whatever happens. Raises OperatorError for a file
        of another's, one that cannot be written, and a manager that does not start it.
        """
        ...

    def uninstall(self) -> bool:
        """Stop the service and remove the file; whether there was one. Raises as `install`."""
        ...

    def state(self) -> ServiceState:
        """What is installed and runs."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed on stdout and stderr, stripped."""

    code: int
    printed: str


class HostPort(Protocol):
    """The machine, as far as a manager of services needs it."""

    @property
    def system(self) -> str:
        """As `sys.platform`: "linux", "darwin"."""
        ...

    @property
    def user_id(self) -> int:
        """The number of the user."""
        ...

    @property
    def home(self) -> Path:
        """The user's folder."""
        ...

    @property
    def config_home(self) -> Path:
        """The folder of the user's settings."""
        ...

    def run(self, command: Sequence[str]) -> Ended:
        """Run a program to its end; one that is not there ends with 127."""
        ...

    def pause(self) -> None:
        """Wait for a moment."""
        ...
