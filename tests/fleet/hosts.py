"""Hosts on this machine: Linux namespaces, each with processes, a network, a name and a disk of its
own, joined by a switch.

A host's folder for temporary files is its disk, and its processes see no other's. All of a host is
held by one process, which ends with the pipe to this one: the kernel then removes processes,
interfaces and mounts, also if this process is killed. Needs root, on Linux; knows nothing of what
runs on the hosts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

DISK: Final = str(Path(os.sep) / "tmp")
"""The disk of a host, on that host."""
_NEEDED: Final = ("ip", "unshare", "nsenter", "mount", "hostname")
_HOST: Final = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc",
                "--kill-child")  # fmt: skip
_SWITCH: Final = ("unshare", "--net")
# What is left of a process whose parent is gone is taken away at once: its signal is ignored.
_HOLD: Final = "trap '' CHLD; echo holds; exec cat >/dev/null"
_BRIDGE: Final = "ip link add bridge type bridge && ip link set bridge up && ip link set lo up"
_SECONDS: Final = 180.0


def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    absent = [name for name in _NEEDED if shutil.which(name, path=_path()) is None]
    if absent:
        return f"needs {', '.join(absent)}"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    command = (*_HOST, "sh", "-c", _BRIDGE)
    tried = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(slots=True)
class Switch:
    """Joins hosts, and this machine as one more, that of the clients."""

    subnet: str
    """The first three numbers of all addresses."""
    hosts: dict[str, Host]
    _held: _Held

    def plug(self, host: Host) -> None:
        """Join a host that has just booted."""
        at = host.holder
        _run("ip", "link", "add", host.name, "netns", str(self._held.pid), "type", "veth",
             "peer", "name", "eth0", "netns", str(at))  # fmt: skip
        self.tell("link", "set", host.name, "master", "bridge", "up")

    def tell(self, *command: str) -> None:
        """Run `ip` where the switch is."""
        self._in_switch("ip", *command)

    def cut(self, host: str) -> None:
        """Pull the cable of a host."""
        self.tell("link", "set", host, "down")

    def heal(self, host: str) -> None:
        """Put it back."""
        self.tell("link", "set", host, "up")

    def slow_down(self, host: str, megabits: int) -> bool:
        """Let so much a second through to a host and from it; False if this kernel cannot."""
        limit = f"rate {megabits}mbit"
        for kind in (f"netem delay 25ms {limit}", f"tbf {limit} burst 64kb latency 400ms"):
            try:
                self._in_switch("tc", "qdisc", "replace", "dev", host, "root", *kind.split())
                self.hosts[host].run(f"tc qdisc replace dev eth0 root {kind}")
            except (OSError, subprocess.CalledProcessError):
                continue
            return True
        return False

    def _in_switch(self, *command: str) -> None:
        _run("nsenter", f"--net=/proc/{self._held.pid}/ns/net", *command)


@dataclass(slots=True)
class Host:
    """One machine. `disk` is its disk as seen from here, and outlives it."""

    name: str
    address: str
    disk: Path
    environment: Mapping[str, str]
    """Of all that runs on it, beside PATH and HOME."""
    _switch: Switch
    _names: Path
    _held: _Held | None = None
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def holder(self) -> int:
        """The process, here, in whose namespaces the host is."""
        assert self._held is not None, f"{self.name} is down"
        return self._held.pid

    def boot(self) -> None:
        """Start it, with nothing running, and join it to the others."""
        (self.disk / "own").mkdir(parents=True, exist_ok=True)
        self.disk.chmod(0o1777)
        own = (
            f"mount --bind {self._names} /etc/hosts && mount --bind {self.disk} {DISK}"
            f" && mount -t tmpfs none /dev/shm && hostname {self.name}"
        )
        self._held = _Held(_HOST, own)
        self._switch.plug(self)
        self.run(
            f"ip link set lo up && ip address add {self.address}/24 dev eth0"
            f" && ip link set eth0 up && ip route add default via {self._switch.subnet}.1"
        )

    def kill(self) -> None:
        """End all of its processes at once, as a power cut does; harmless when it is down."""
        if self._held is not None:
            self._held.end()
            self._held = None
        for process in self._started:
            process.kill()
            process.wait()
        self._started.clear()

    @property
    def entering(self) -> tuple[str, ...]:
        """What begins a command that runs on it."""
        space = f"/proc/{self.holder}/ns"
        spaces = [f"--{kind}={space}/{name}" for kind, name in _SPACES.items()]
        return ("nsenter", *spaces)

    def run(self, command: str) -> str:
        """What a shell command in `DISK` prints. Raises CalledProcessError, with what it said."""
        return _run(*self.entering, *_shell(command), environment=self._environment())

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Begin a shell command in `DISK` that goes on until it ends or the host is killed."""
        with self.log.open("ab") as out:
            process = subprocess.Popen(
                (*self.entering, *_shell(command)), stdin=subprocess.DEVNULL, stdout=out,
                stderr=out, env=self._environment(),
            )  # fmt: skip
        self._started.append(process)
        return process

    @property
    def log(self) -> Path:
        """What all that was started has printed."""
        return self.disk / "log"

    def _environment(self) -> dict[str, str]:
        return {**_environment(), "HOME": f"{DISK}/own", "TMPDIR": DISK, **self.environment}


_SPACES: Final = {"net": "net", "uts": "uts", "ipc": "ipc", "mount": "mnt",
                  "pid": "pid_for_children"}  # fmt: skip
"""Options of `nsenter`, and what the kernel calls them."""


class _Held:
    """A process that holds namespaces, and ends with the pipe to this one."""

    def __init__(self, namespaces: Sequence[str], own: str) -> None:
        self._process = subprocess.Popen(
            (*namespaces, "sh", "-c", f"{own} && {_HOLD}"), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment(),
        )  # fmt: skip
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if said != b"holds\n":
            self.end()
            raise OSError(f"a host does not start: {said.decode()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """All that runs in them is killed."""
        with self._process:
            self._process.kill()


@contextmanager
def joined_hosts(
    folder: Path, names: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Switch]:
    """Running hosts, with nothing on them but `environment`; this machine reaches them by their
    addresses, and they each other by their names."""
    subnet = f"198.18.{os.getpid() % 250}"  # kept for tests of networks: RFC 2544
    addresses = {name: f"{subnet}.{number}" for number, name in enumerate(names, 2)}
    known = folder / "hosts"
    known.write_text("".join(f"{at} {name}\n" for name, at in addresses.items())
                     + "127.0.0.1 localhost\n")  # fmt: skip
    with ExitStack() as stack:
        held = _Held(_SWITCH, _BRIDGE)
        stack.callback(held.end)
        switch = Switch(subnet, {}, held)
        cable = f"hosts-{os.getpid()}"
        switch.tell("link", "add", "clients", "type", "veth", "peer", "name", cable, "netns",
                    str(os.getpid()))  # fmt: skip
        # The kernel takes its time; the next switch has a cable of this name.
        stack.callback(_run, "ip", "link", "delete", cable)
        switch.tell("link", "set", "clients", "master", "bridge", "up")
        _run("ip", "address", "add", f"{subnet}.1/24", "dev", cable)
        _run("ip", "link", "set", cable, "up")
        for name, address in addresses.items():
            host = Host(name, address, folder / name, environment, switch, known)
            switch.hosts[name] = host
            stack.callback(host.kill)
            host.boot()
        yield switch


def _shell(command: str) -> tuple[str, ...]:
    return "sh", "-c", f"cd {DISK} && {command}"


def _run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment or _environment(),
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode:
        raise subprocess.CalledProcessError(
            done.returncode, command, done.stdout, f"{done.stdout}{done.stderr}"
        )
    return done.stdout


def _path() -> str:
    """Programs of the system are below sbin."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _environment() -> dict[str, str]:
    return {"PATH": _path(), "LC_ALL": "C.UTF-8"}
