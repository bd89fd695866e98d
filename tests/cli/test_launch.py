"""`semantic launch`: what it prints, what it writes, and what it leaves as it was."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.cli.support import Ran, process, semantic

pytestmark = pytest.mark.process

MODEL = "org/Some-Model"
CONTEXT = 131_072
CLIENTS = ("claude", "codex", "opencode")


class Server:
    """What `/v1/models` of a running server says, and to whom. Starts on a free port."""

    def __init__(self) -> None:
        self.status = 200
        self.key: str | None = None
        self.body: object = {"data": [_model(MODEL), _model("other", 4096)]}
        self.keys: list[str | None] = []
        handler = type("Handler", (_Handler,), {"server_of_test": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_of_test: ClassVar[Server]

    def do_GET(self) -> None:
        server = self.server_of_test
        key = self.headers.get("authorization")
        server.keys.append(key)
        status = server.status
        if server.key is not None and key != f"Bearer {server.key}":
            status = 401
        body = server.body if isinstance(server.body, bytes) else json.dumps(server.body).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def _model(name: str, tokens: object = CONTEXT) -> dict[str, object]:
    return {"id": name, "max_model_len": tokens}


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No settings and no keys of the user who runs the tests."""
    for name in (
        *("CLAUDE_CONFIG_DIR", "CODEX_HOME", "OPENCODE_CONFIG", "XDG_CONFIG_HOME"),
        *("SEMANTIC_API_KEY", "HTTP_PROXY", "http_proxy"),
    ):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def file_of(client: str, home: Path) -> Path:
    return (
        home
        / {
            "claude": ".claude/settings.json",
            "codex": ".codex/config.toml",
            "opencode": ".config/opencode/opencode.json",
        }[client]
    )


def launch(client: str, server: Server, *arguments: str) -> Ran:
    return semantic("launch", client, "--url", server.url, *arguments)


def put(file: Path, text: str | bytes, mode: int = 0o640) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def held(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    return found


def copies(file: Path) -> list[Path]:
    return [path for path in file.parent.iterdir() if path.name.endswith(".bak")]


# --- nothing happens unless it is asked for ---------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
def test_without_write_no_file_and_no_folder_appears(
    client: str, server: Server, home: Path
) -> None:
    ran = launch(client, server, "--show")
    assert (ran.code, ran.err) == (0, "")
    assert "--write" in ran.out
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_shown_is_what_is_written(client: str, server: Server, home: Path) -> None:
    shown = json.loads(launch(client, server, "--json").out)
    written = json.loads(launch(client, server, "--json", "--write").out)
    assert (shown["written"], written["written"]) == (False, True)
    assert shown["changes"] == written["changes"]
    assert shown["file"] == str(file_of(client, home))
    assert (shown["model"], shown["context_tokens"]) == (MODEL, CONTEXT)
    found = held(file_of(client, home))
    for change in written["changes"]:
        value: Any = found
        for part in change["setting"]:
            value = value[part]
        assert value == change["becomes"]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_second_time_there_is_nothing_to_do(client: str, server: Server, home: Path) -> None:
    launch(client, server, "--write")
    before = file_of(client, home).read_bytes()
    ran = launch(client, server, "--write")
    assert "has all of this already" in ran.out
    assert file_of(client, home).read_bytes() == before
    assert copies(file_of(client, home)) == []


# --- what is written --------------------------------------------------------------------------


def test_claude_gets_variables_with_the_servers_own_context(server: Server, home: Path) -> None:
    assert launch("claude", server, "--write").code == 0
    variables = held(file_of("claude", home))["env"]
    assert variables["ANTHROPIC_BASE_URL"] == server.url
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(CONTEXT)
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == str(CONTEXT)
    assert variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert variables["ANTHROPIC_API_KEY"] == ""
    models = {name: value for name, value in variables.items() if name.endswith("_MODEL")}
    assert set(models.values()) == {MODEL}
    assert len(models) == 6


def test_claude_is_told_no_window_that_it_takes_for_a_larger_one(
    server: Server, home: Path
) -> None:
    put(file_of("claude", home), '{"env": {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "200000"}}')
    server.body = {"data": [_model(MODEL, 40_000)]}
    launch("claude", server, "--write")
    variables = held(file_of("claude", home))["env"]
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in variables
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000"


def test_a_shell_takes_over_what_claude_needs(server: Server) -> None:
    server.body = {"data": [_model("a 'model' with $marks")]}
    done = subprocess.run(
        ["sh", "-c", 'eval "$LINES_TO_RUN"; env'],
        env={"LINES_TO_RUN": launch("claude", server, "--show").out, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ANTHROPIC_DEFAULT_OPUS_MODEL=a 'model' with $marks" in done.stdout.splitlines()
    assert f"ANTHROPIC_BASE_URL={server.url}" in done.stdout.splitlines()
    assert done.stderr == ""


def test_codex_gets_a_provider(server: Server, home: Path) -> None:
    assert launch("codex", server, "--write").code == 0
    found = held(file_of("codex", home))
    provider = found["model_providers"]["semantic"]
    assert provider["base_url"] == f"{server.url}/v1"
    assert provider["wire_api"] == "responses"
    assert "env_key" not in provider
    assert found["model_provider"] == "semantic"
    assert (found["model"], found["model_context_window"]) == (MODEL, CONTEXT)


def test_opencode_gets_a_provider(server: Server, home: Path) -> None:
    assert launch("opencode", server, "--write").code == 0
    found = held(file_of("opencode", home))
    provider = found["provider"]["semantic"]
    assert found["model"] == f"semantic/{MODEL}"
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"] == {"baseURL": f"{server.url}/v1"}
    assert provider["models"][MODEL]["limit"] == {"context": CONTEXT, "output": 32_000}


def test_a_model_can_be_chosen(server: Server) -> None:
    found = json.loads(launch("codex", server, "--model", "other", "--json").out)
    assert (found["model"], found["context_tokens"]) == ("other", 4096)


@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_is_not_started_with_too_little_context(
    client: str, server: Server, programs: Path
) -> None:
    assert (
        "other has 4096 tokens of context"
        in launch(client, server, "--model", "other", "--show").err
    )
    put(programs / client, f"#!{sys.executable}\nprint('started')\n", mode=0o755)
    small = ("launch", client, "--url", server.url, "--model", "other")
    ran = process(*small)
    assert (ran.code, ran.out, len(ran.error_lines)) == (2, "", 1)
    assert f"other has 4096 tokens of context; {client} needs " in ran.err
    ran = process(*small, "--force")
    assert (ran.code, ran.out) == (0, "started\n")
    assert "other has 4096 tokens of context" in ran.err


def test_an_unknown_agent_is_answered_with_those_there_are() -> None:
    ran = semantic("launch", "foo")
    assert ran.code == 2
    assert "No such command 'foo'; expected one of claude, codex, opencode" in ran.err
    assert ran.err.endswith("opencode\n")
    assert semantic("launch", "claud").err.endswith("Did you mean 'claude'?\n")


@pytest.mark.parametrize(
    ("client", "variable", "file"),
    [
        ("claude", "CLAUDE_CONFIG_DIR", "settings.json"),
        ("codex", "CODEX_HOME", "config.toml"),
        ("opencode", "XDG_CONFIG_HOME", "opencode/opencode.json"),
    ],
)
def test_a_clients_own_variable_says_where_its_file_is(
    client: str,
    variable: str,
    file: str,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "own"))
    assert launch(client, server, "--write").code == 0
    assert (tmp_path / "own" / file).exists()


# --- keys -------------------------------------------------------------------------------------

KEY = "s3cret-0f-the-user"


@pytest.mark.parametrize("client", CLIENTS)
def test_a_key_is_named_and_neither_written_nor_printed(
    client: str, server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = KEY
    monkeypatch.setenv("MY_KEY", KEY)
    outs = [
        launch(client, server, "--key-variable", "MY_KEY", *more)
        for more in (("--show",), ("--json",), ("--write",))
    ]
    assert [ran.code for ran in outs] == [0, 0, 0]
    written = file_of(client, home).read_text(encoding="utf-8")
    assert "MY_KEY" in written
    assert [text for ran in outs for text in (ran.out, ran.err, written) if KEY in text] == []


def test_a_key_is_sent_only_to_who_asks_for_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMANTIC_API_KEY", KEY)
    assert launch("codex", server, "--show").code == 0
    assert server.keys == [None]


def test_claude_runs_a_command_for_the_key_and_has_no_token_before_it(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch("claude", server, "--write")
    server.key = KEY
    monkeypatch.setenv("SEMANTIC_API_KEY", KEY)
    launch("claude", server, "--write")
    found = held(file_of("claude", home))
    assert "ANTHROPIC_AUTH_TOKEN" not in found["env"]
    done = subprocess.run(
        ["sh", "-c", found["apiKeyHelper"]], capture_output=True, text=True, check=True
    )
    assert done.stdout == KEY
    assert (
        'export ANTHROPIC_AUTH_TOKEN="$SEMANTIC_API_KEY"' in launch("claude", server, "--show").out
    )


@pytest.mark.parametrize("client", CLIENTS)
def test_a_missing_and_a_wrong_key_are_one_line(
    client: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = KEY
    ran = launch(client, server, "--show")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "SEMANTIC_API_KEY" in ran.err
    monkeypatch.setenv("SEMANTIC_API_KEY", "wr0ng")
    ran = launch(client, server, "--show")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "does not accept the key in SEMANTIC_API_KEY" in ran.err
    assert "wr0ng" not in ran.err


@pytest.mark.parametrize("more", [("--show",), ("--json",), ("--write",)])
def test_a_key_that_a_user_wrote_into_a_file_is_not_shown(
    more: tuple[str, ...], server: Server, home: Path
) -> None:
    had = {
        "apiKeyHelper": f"echo {KEY}",
        "env": {
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_AUTH_TOKEN": KEY,
            "ANTHROPIC_BASE_URL": f"https://me:{KEY}@example",
            "CLAUDE_CODE_SUBAGENT_MODEL": {"key": KEY},
            "OTHER": KEY,
        },
    }
    put(file_of("claude", home), json.dumps(had))
    ran = launch("claude", server, *more)
    assert ran.code == 0
    assert KEY not in ran.out + ran.err
    assert "********" in ran.out


# --- what a user has stays --------------------------------------------------------------------


def test_all_else_in_a_json_file_stays(server: Server, home: Path) -> None:
    had = {
        "model": "opus",
        "env": {"MINE": "ü \ud83d", "CLAUDE_CODE_ATTRIBUTION_HEADER": "1"},
        "permissions": {"allow": ["Bash(ls:*)"], "n": 1.5},
    }
    file = put(file_of("claude", home), json.dumps(had, indent=4))
    assert launch("claude", server, "--write").code == 0
    found = held(file)
    assert list(found) == list(had)
    assert found["permissions"] == had["permissions"]
    assert found["env"]["MINE"] == "ü \ud83d"
    assert found["env"]["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert '\n    "model"' in file.read_text(encoding="utf-8")


TOML = """\
# mine
model = "gpt"  # the good one
approval_policy = "never"

[model_providers.other]  # somebody else's
name = "other"
base_url = "https://example/v1"

[projects."some/where"]
trust_level = "trusted"

[mcp_servers.docs]
command = "docs"
args = ["--all",  # every one
        "-v"]

[model_providers.semantic]
base_url = "http://127.0.0.1:1/v1"
request_max_retries = 9  # patience
"""


def test_all_else_in_a_toml_file_stays_with_comments_and_layout(server: Server, home: Path) -> None:
    file = put(file_of("codex", home), TOML)
    assert launch("codex", server, "--write").code == 0
    text = file.read_text(encoding="utf-8")
    ours = ('model = "gpt"', 'base_url = "http://127.0.0.1:1/v1"')
    lost = [line for line in TOML.splitlines() if line not in text and not line.startswith(ours)]
    assert lost == []
    assert f'model = "{MODEL}"  # the good one' in text
    found = held(file)
    assert found["model_providers"]["semantic"]["request_max_retries"] == 9
    assert found["model_providers"]["semantic"]["base_url"] == f"{server.url}/v1"
    assert found["model_providers"]["other"]["base_url"] == "https://example/v1"
    assert found["model_provider"] == "semantic"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model_providers = { other = { name = 'o' } }\n",
        "[model_providers]\nother.name = 'o'\n",
        "[model_providers.semantic]\n[tui]\nx = 1\n[model_providers.z]\nname = 'z'\n",
        "model_providers.semantic.name = 'x'\r\n[tui]\r\nx = nan\r\n",
        "[[array]]\na = 1\n[[array]]\na = 2\n",
    ],
)
def test_toml_of_any_layout(text: str, server: Server, home: Path) -> None:
    file = put(file_of("codex", home), text)
    ran = launch("codex", server, "--write")
    assert ran.code == 0, ran.err
    found, had = held(file), tomllib.loads(text)
    assert found["model_providers"]["semantic"]["wire_api"] == "responses"
    assert found["model"] == MODEL
    for name, table in had.items():
        if name != "model_providers":
            assert repr(found[name]) == repr(table)
        else:
            assert {**found[name], "semantic": 0} == {**table, "semantic": 0}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_copy_of_the_file_as_it_was_is_kept(client: str, server: Server, home: Path) -> None:
    text = "# mine\n" if client == "codex" else '{"mine": 1}'
    file = put(file_of(client, home), text, mode=0o640)
    ran = launch(client, server, "--write")
    (copy,) = copies(file)
    assert str(copy) in ran.out
    assert copy.read_text(encoding="utf-8") == text
    assert stat.S_IMODE(copy.stat().st_mode) == stat.S_IMODE(file.stat().st_mode) == 0o640
    server.body = {"data": [_model("next")]}
    launch(client, server, "--write")
    assert len(copies(file)) == 2
    assert sorted(path.name for path in file.parent.iterdir() if path not in copies(file)) == [
        file.name
    ]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_new_file_is_for_its_owner_alone(client: str, server: Server, home: Path) -> None:
    launch(client, server, "--write")
    file = file_of(client, home)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert copies(file) == []


def test_a_symbolic_link_stays_one(server: Server, home: Path, tmp_path: Path) -> None:
    kept = put(tmp_path / "dotfiles" / "config.toml", "# mine\n")
    file = file_of("codex", home)
    file.parent.mkdir()
    file.symlink_to(kept)
    assert launch("codex", server, "--write").code == 0
    assert file.is_symlink()
    assert held(kept)["model"] == MODEL
    assert len(copies(kept)) == 1


# --- what cannot be done is one line, and changes nothing --------------------------------------


@pytest.mark.parametrize(
    ("client", "text", "words"),
    [
        ("claude", "{", "expected JSON without comments"),
        ("claude", '{} // "x"', "expected JSON without comments"),
        ("claude", "[1]", "expected a JSON object, got list"),
        ("claude", '{"a": 1, "a": 2}', "'a' occurs twice"),
        ("claude", '{"env": 3}', "env must be a table of settings, got int"),
        ("claude", '{"a": NaN}', "NaN is not JSON"),
        ("claude", '{"a": 1e999}', "too large"),
        ("claude", b'{"a": "\xff"}', "not UTF-8"),
        ("claude", "[" * 100_000, "nests too deeply"),
        ("opencode", '{"provider": []}', "provider must be a table of settings, got list"),
        ("opencode", '{"provider": {"semantic": {"options": "x"}}}', "provider.semantic.options"),
        ("codex", "a = ", "expected TOML"),
        ("codex", "a = 1\na = 2\n", "expected TOML"),
        ("codex", "model_providers = 1", "a table of settings, got int"),
        ("codex", "[[model_providers]]\n", "a table of settings, got list"),
    ],
)
@pytest.mark.parametrize("more", [("--show",), ("--write",)])
def test_a_file_that_is_not_understood_is_left_alone(
    client: str, text: str | bytes, words: str, more: tuple[str, ...], server: Server, home: Path
) -> None:
    file = put(file_of(client, home), text)
    before = file.read_bytes()
    ran = launch(client, server, *more)
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert f"left {file} unchanged" in ran.err
    assert words in ran.err
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_folder_in_the_files_place(server: Server, home: Path) -> None:
    file_of("codex", home).mkdir(parents=True)
    ran = launch("codex", server, "--write")
    assert (ran.code, len(ran.error_lines)) == (2, 1)


def test_a_place_that_cannot_be_written(server: Server, home: Path) -> None:
    put(home / ".codex", "a file in the folder's place")
    ran = launch("codex", server, "--write")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "config.toml cannot be" in ran.err


def test_a_disk_that_is_full_leaves_the_file(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(file_of("codex", home), "# mine\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ran = launch("codex", server, "--write")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "No space left" in ran.err
    assert file.read_text(encoding="utf-8") == "# mine\n"
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_that_somebody_else_changes_meanwhile_is_left_to_him(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(file_of("codex", home), "# mine\n")
    synced = os.fsync

    def changed(descriptor: int) -> None:
        file.write_text("# his\n")
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", changed)
    ran = launch("codex", server, "--write")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "another program changed" in ran.err
    assert file.read_text(encoding="utf-8") == "# his\n"


def test_no_server_is_one_line_that_says_how_to_start_one(server: Server) -> None:
    server.stop()
    try:
        ran = launch("claude", server, "--write")
    finally:
        server.__init__()  # type: ignore[misc]  # the fixture stops it again
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "cannot reach http://127.0.0.1:" in ran.err
    assert "semantic serve" in ran.err


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (503, {}, 3, "is loading"),
        (404, {}, 4, "status 404"),
        (302, {"data": [_model(MODEL)]}, 4, "status 302"),
        (200, b"<html>", 4, "max_model_len"),
        (200, b"[" * 100_000, 4, "max_model_len"),
        (200, [], 4, "max_model_len"),
        (200, {"data": []}, 4, "max_model_len"),
        (200, {"data": [1, {"id": "x"}]}, 4, "max_model_len"),
        (200, {"data": [_model(MODEL, "many")]}, 4, "max_model_len"),
        (200, {"data": [_model(MODEL, True)]}, 4, "max_model_len"),
        (200, {"data": [_model(MODEL, 0)]}, 4, "max_model_len"),
        (200, {"data": [_model("a\nb")]}, 4, "max_model_len"),
    ],
)
def test_an_answer_that_is_of_no_use(
    status: int, body: object, code: int, words: str, server: Server, home: Path
) -> None:
    server.status, server.body = status, body
    ran = launch("codex", server, "--write")
    assert (ran.code, len(ran.error_lines)) == (code, 1)
    assert words in ran.err
    assert list(home.iterdir()) == []


def test_an_unknown_model_is_answered_with_those_there_are(server: Server) -> None:
    ran = launch("codex", server, "--model", "nobody")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert f"expected one of {MODEL}, other" in ran.err


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1",
        "http://",
        "http://host:port",
        "http://[::1",
        "http://127.0.0.1:8000/v2",
        "http://127.0.0.1:8000/?a",
        "http://me:s3cret@127.0.0.1:8000",
        "http://a b",
    ],
)
def test_an_address_that_cannot_be_one(url: str) -> None:
    ran = semantic("launch", "codex", "--url", url)
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "--url" in ran.err
    assert "s3cret" not in ran.err


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
def test_an_address_may_end_as_clients_want_it(end: str, server: Server) -> None:
    ran = semantic("launch", "codex", "--url", server.url + end, "--json")
    assert json.loads(ran.out)["url"] == server.url


def test_an_address_may_lack_its_scheme(server: Server) -> None:
    ran = semantic("launch", "codex", "--url", server.url.removeprefix("http://"), "--json")
    assert json.loads(ran.out)["url"] == server.url


def test_a_variable_that_is_no_name(server: Server) -> None:
    ran = launch("claude", server, "--key-variable", "A; rm")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert "--key-variable" in ran.err


@pytest.mark.parametrize("value", ["", "relative"])
def test_a_home_that_is_none(value: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", value)
    ran = launch("codex", server, "--show")
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert "HOME" in ran.err


def test_a_proxy_of_the_environment_is_not_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxies: Mapping[str, str] = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:1")
    for name, value in proxies.items():
        monkeypatch.setenv(name, value)
    assert launch("codex", server, "--show").code == 0


# --- starting it --------------------------------------------------------------------------------

PROGRAM = """#!{python}
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open({report!r}, "w"))
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs, alone in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def started(
    client: str, server: Server, programs: Path, *arguments: str
) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables that the agent is started with."""
    report = programs / "report.json"
    program = PROGRAM.format(python=sys.executable, report=str(report))
    put(programs / client, program, mode=0o755)
    ran = process("launch", client, "--url", server.url, *arguments)
    assert (ran.code, ran.out) == (7, "")
    first = f"starting {client} with {MODEL} at {server.url}, {CONTEXT} tokens of context; "
    assert ran.err == first + "its settings stay as they are\n"
    words, variables = json.loads(report.read_text(encoding="utf-8"))
    return words, variables


def test_claude_is_started_with_the_server(server: Server, home: Path, programs: Path) -> None:
    words, variables = started("claude", server, programs, "--", "-p", "it's --model", "--write")
    assert words == ["-p", "it's --model", "--write"]
    assert variables["ANTHROPIC_BASE_URL"] == server.url
    assert variables["ANTHROPIC_MODEL"] == MODEL
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "none"
    assert variables["HOME"] == str(home)
    assert list(home.iterdir()) == []


def test_claude_is_started_with_the_users_key(
    server: Server, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = KEY
    monkeypatch.setenv("MY_KEY", KEY)
    _, variables = started("claude", server, programs, "--key-variable", "MY_KEY")
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY


def test_codex_is_started_with_a_provider(server: Server, home: Path, programs: Path) -> None:
    words, _ = started("codex", server, programs, "--", "exec", "hello")
    assert words[-2:] == ["exec", "hello"]
    given = tomllib.loads("\n".join(words[1:-2:2]))
    assert set(words[:-2:2]) == {"-c"}
    assert given["model"] == MODEL
    assert given["model_provider"] == "semantic"
    assert given["model_providers"]["semantic"]["base_url"] == f"{server.url}/v1"
    assert list(home.iterdir()) == []


def test_opencode_is_started_with_a_provider(server: Server, home: Path, programs: Path) -> None:
    words, variables = started("opencode", server, programs)
    given = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert words == []
    assert given["model"] == f"semantic/{MODEL}"
    assert given["provider"]["semantic"]["options"] == {"baseURL": f"{server.url}/v1"}
    assert list(home.iterdir()) == []


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("client", CLIENTS)
def test_an_agent_that_is_not_installed_is_one_line(client: str, server: Server) -> None:
    ran = launch(client, server)
    assert (ran.code, len(ran.error_lines)) == (4, 1)
    assert f"cannot find {client}: " in ran.err
    assert "npm install -g " in ran.err


def test_a_program_that_cannot_run_is_one_line(server: Server, programs: Path) -> None:
    put(programs / "claude", "#!/no/such/interpreter\n", mode=0o755)
    ran = launch("claude", server)
    assert (ran.code, len(ran.error_lines)) == (4, 2)
    assert "cannot start " in ran.err


def test_arguments_without_a_start_are_refused(server: Server, home: Path) -> None:
    ran = launch("claude", server, "--write", "--", "-p")
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert list(home.iterdir()) == []
