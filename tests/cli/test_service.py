"""`semantic service` writes what the platform's manager understands, once, and no secret."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from semantic.cli.options import command
from semantic.domain.errors import OperatorError
from semantic_server.cli import service
from semantic_server.cli.serve import ServeOptions
from semantic_server.cli.service import flags, service_manager
from semantic_server.service_managers import MARK, Ended, Launchd, Service, Systemd
from tests.cli.support import Ran, semantic

SYSTEMS = ("linux", "darwin")
HOSTILE = ("/opt/a b/python", "serve", '--model=50% "$HOME" \\x `id` ; <&>', "--host=::1")


@dataclass
class FakeHost:
    """Implements `HostPort`: a machine whose manager knows files by what `start` found in them."""

    folder: Path
    system: str = "linux"
    has_manager: bool = True
    fails: str = ""
    pauses_to_stop: int = 0
    ran: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    running: bool = False
    user_id: int = 501

    @property
    def home(self) -> Path:
        return self.folder

    @property
    def config_home(self) -> Path:
        return self.folder / ".config"

    def run(self, command: Sequence[str]) -> Ended:
        words = " ".join(command)
        self.ran.append(words)
        if not self.has_manager:
            return Ended(127, f"{command[0]}: not found")
        if self.fails and self.fails in words:
            return Ended(1, "no space left")
        return (
            self._launchctl(*command[1:]) if command[0] == "launchctl" else self._systemctl(words)
        )

    def _systemctl(self, words: str) -> Ended:
        verb = words.removeprefix("systemctl --user ").split()[0]
        if verb == "is-active":
            return Ended(0 if self.running else 3, "")
        if verb == "restart" or (verb == "start" and not self.running):
            self._start(self.config_home / "systemd" / "user" / "semantic.service")
        if verb == "disable":
            self.running = False
        return Ended(0, "")

    def _launchctl(self, verb: str, domain: str, file: str = "") -> Ended:
        if verb == "print" and domain != "gui/501":
            return Ended(0, "state = running") if self.running else Ended(113, "not found")
        if verb == "bootout":
            self.running = self.pauses_to_stop > 0
        if verb == "bootstrap":
            assert not self.running, "launchd refuses a label that it still has"
            self._start(Path(file))
        return Ended(0, "")

    def pause(self) -> None:
        self.pauses_to_stop -= 1
        self.running = self.pauses_to_stop > 0

    def _start(self, file: Path) -> None:
        self.started.append(file.read_text(encoding="utf-8"))
        self.running = True


@pytest.fixture(params=SYSTEMS)
def host(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> FakeHost:
    """The machine that the command finds; no setting is in its environment or in a file."""
    made = FakeHost(tmp_path, request.param)
    monkeypatch.setattr(service, "service_manager", lambda: service_manager(made))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / ".config"))
    for name in [name for name in os.environ if name.startswith("SEMANTIC_")]:
        monkeypatch.delenv(name)
    return made


def files_of(host: FakeHost) -> list[Path]:
    return [path for path in host.folder.rglob("*") if path.is_file()]


def install(*arguments: str) -> Ran:
    return semantic("service", "install", *arguments)


def test_it_is_written_started_and_shown(host: FakeHost) -> None:
    ran = install("--port", "8100", "--no-store")
    assert ran.code == 0, ran.err
    (file,) = files_of(host)
    text = file.read_text(encoding="utf-8")
    assert host.started == [text]
    assert "--port=8100" in text
    assert "--no-store" in text
    assert f"wrote {file}" in ran.out
    assert text in ran.out
    log = "journalctl --user --unit" if host.system == "linux" else "tail -f"
    assert f"log        {log}" in ran.out


def test_the_same_again_changes_nothing_and_other_flags_restart_it(host: FakeHost) -> None:
    install("--port", "8100")
    (file,) = files_of(host)
    written = file.stat().st_mtime_ns, file.stat().st_ino
    assert "unchanged" in install("--port", "8100").out
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == written
    assert len(host.started) == 1
    host.pauses_to_stop = 3
    assert install("--port", "8200").code == 0
    assert len(host.started) == 2
    assert "--port=8200" in host.started[1]


def test_one_that_has_stopped_is_started_again(host: FakeHost) -> None:
    install()
    host.running = False
    assert "unchanged" in install().out
    assert len(host.started) == 2


def test_the_state_is_told(host: FakeHost) -> None:
    assert semantic("service", "status").code == 1
    install()
    ran = semantic("service", "status")
    assert (ran.code, "running    yes" in ran.out) == (0, True)
    assert '"running": true' in semantic("service", "status", "--json").out
    host.running = False
    assert (semantic("service", "status").code, len(files_of(host))) == (1, 1)


def test_uninstalling_stops_it_and_leaves_no_file(host: FakeHost) -> None:
    install()
    ran = semantic("service", "uninstall")
    assert (ran.code, ran.out.startswith("removed ")) == (0, True)
    assert (host.running, files_of(host)) == (False, [])
    again = semantic("service", "uninstall")
    assert (again.code, again.out.startswith("there is no ")) == (0, True)


def test_where_no_manager_runs_one_line_says_so(host: FakeHost) -> None:
    host.has_manager = False
    for arguments in (["install"], ["uninstall"], ["status"]):
        ran = semantic("service", *arguments)
        assert (ran.code, len(ran.error_lines)) == (4, 1)
        assert "semantic serve" in ran.err
    assert files_of(host) == []


def test_another_system_has_no_manager(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="neither systemd nor launchd"):
        service_manager(FakeHost(tmp_path, "freebsd14"))


def test_a_file_of_anothers_is_left_alone(host: FakeHost) -> None:
    install()
    (file,) = files_of(host)
    file.write_text("mine\n")
    for arguments in (["install", "--port", "1234"], ["uninstall"], ["status"]):
        ran = semantic("service", *arguments)
        assert (ran.code, len(ran.error_lines)) == (4, 1)
        assert f"{file} is not a file of" in ran.err
    assert file.read_text() == "mine\n"


def test_a_manager_that_refuses_is_quoted(host: FakeHost) -> None:
    host.fails = "enable"
    ran = install()
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "no space left" in ran.err


@pytest.mark.parametrize("flag", ["--api-key", "--operator-key"])
def test_a_key_is_not_written(host: FakeHost, flag: str) -> None:
    ran = install("--api-key", "s3cret-a", *(["--operator-key", "s3cret-b"] * ("op" in flag)))
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "--api-key-file FILE" in ran.err
    assert "s3cret" not in ran.out + ran.err
    assert (files_of(host), host.started) == ([], [])


def test_a_file_of_keys_is_named_and_not_read_into_the_text(host: FakeHost) -> None:
    keys = host.folder / "keys"
    keys.write_text("s3cret-a\n")
    ran = install("--api-key-file", str(keys), "--host", "0.0.0.0")
    assert ran.code == 0, ran.err
    assert f"--api-key-file={keys}" in host.started[0]
    assert "s3cret" not in host.started[0] + ran.out


def test_a_setting_that_the_service_would_not_see_is_refused(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMANTIC_MAX_WAITING", "7")
    ran = install()
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "SEMANTIC_MAX_WAITING: pass --max-waiting" in ran.err
    assert files_of(host) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["--host", "0.0.0.0"], "expected --api-key"), (["--port", "99999"], "port (flag)")],
)
def test_a_server_that_would_not_start_is_not_installed(
    host: FakeHost, given: list[str], expected: str
) -> None:
    ran = install(*given)
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert expected in ran.err
    assert files_of(host) == []


def test_a_line_break_cannot_add_a_line(host: FakeHost) -> None:
    ran = install("--model", "a\nExecStartPre=/bin/id")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "control characters" in ran.err
    assert files_of(host) == []


def test_a_write_that_fails_leaves_the_old_text(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    (file,) = files_of(host)
    before = file.read_text()

    def full(*_: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    ran = install("--port", "8200")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert (files_of(host), file.read_text()) == ([file], before)


# --- the texts --------------------------------------------------------------------------------


def test_a_property_list_has_the_words_as_they_are(tmp_path: Path) -> None:
    text = Launchd(FakeHost(tmp_path, "darwin")).text(Service(HOSTILE, 125))
    read = plistlib.loads(text.encode())
    assert read["ProgramArguments"] == list(HOSTILE)
    assert (read["ExitTimeOut"], read["RunAtLoad"], MARK in text) == (125, True, True)


def test_a_unit_expands_nothing(tmp_path: Path) -> None:
    text = Systemd(FakeHost(tmp_path)).text(Service(HOSTILE, 125))
    (line,) = [one for one in text.splitlines() if one.startswith("ExecStart=")]
    assert line.endswith('"--model=50%% \\"$$HOME\\" \\\\x `id` ; <&>" "--host=::1"')
    assert "TimeoutStopSec=125" in text


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_itself_finds_no_mistake(tmp_path: Path) -> None:
    unit = tmp_path / "semantic.service"
    python = shutil.which("true") or ""
    unit.write_text(Systemd(FakeHost(tmp_path)).text(Service((python, *HOSTILE[1:]), 125)))
    verify = ["systemd-analyze", "--user", "--man=no", "verify"]
    environment = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin"}
    ran = subprocess.run(
        [*verify, str(unit)], capture_output=True, text=True, check=False, env=environment
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("Type=exec", "Type=nonsense"))
    ran = subprocess.run(
        [*verify, str(unit)], capture_output=True, text=True, check=False, env=environment
    )
    assert "nonsense" in ran.stderr, "the tool finds no mistake at all"


# --- the flags --------------------------------------------------------------------------------

VALUES: dict[str, object] = {
    "embedding_model": "org/vectors",
    "host": "::1", "api_keys": ["a"], "operator_keys": ["b"], "allowed_hosts": ["a", "b"],
    "allowed_origins": ["http://a"], "served_model_name": ["-a", "b c"],
    "model": ["org/name", "b"], "allowed_models": ["c"], "kept_models": ["b"],
    "allow_pull": ["org/*"],
    "adapters": ["x=/y"], "remote_store": "s3://a/b",
    "kv_events": "ipc:///a", "kv_events_topic": "kv",
    "log_format": "json",
    "tool_call_parser": "hermes", "reasoning_parser": "none",
    "image_input": "note", "log_level": "debug", "no_store": True, "force_usage": True,
    "any_model_name": True,
    "share_across_chips": True, "exact_batch": "on", "drafts": "off", "kv_bits": ["8"],
    "kv_bits_force": True,
    **dict.fromkeys(
        ("api_key_file", "operator_key_file", "fleet_secret_file", "store"), Path("/a b")
    ),
    "public_prefix": [Path("/a"), Path("/b")],
}  # fmt: skip


def options_of(**given: object) -> ServeOptions:
    return ServeOptions(**given)


def test_every_flag_of_the_server_is_passed_through() -> None:
    """They are parsed back to what was given."""
    names = [one.name for one in fields(ServeOptions)]
    given = options_of(**{name: VALUES.get(name, 3) for name in names})
    assert all(one.default is None or one.default is MISSING for one in fields(ServeOptions))
    found: list[ServeOptions] = []

    def keep(options: ServeOptions) -> None:
        found.append(options)

    app = typer.Typer()
    app.command()(command(keep))
    ran = CliRunner().invoke(app, list(flags(given, None)))
    assert (ran.exit_code, found) == (0, [given]), ran.output


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    options = options_of(model=["model"], embedding_model="model", store=Path("store"))
    assert list(flags(options, Path("c.toml"))) == [
        f"--model={tmp_path}/model", f"--embedding-model={tmp_path}/model",
        f"--store={tmp_path}/store", f"--config={tmp_path}/c.toml",
    ]  # fmt: skip
    assert list(flags(options_of(model=["org/name"]), None)) == ["--model=org/name"]
    adapters = options_of(adapters=["x=one", "b+y=/two", "three"])
    assert list(flags(adapters, None)) == [
        f"--adapter=x={tmp_path}/one", "--adapter=b+y=/two", f"--adapter={tmp_path}/three",
    ]  # fmt: skip
