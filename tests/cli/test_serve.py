"""`semantic serve` as a process: what it refuses to begin with, and how it ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from semantic.cli.progress import ServerProgress
from semantic.composition.engine_settings import Settings
from semantic.domain.errors import InvalidRequestError
from semantic_server.cli.serve import (
    ServeOptions,
    _of_model,
    _print_ready,
    _serve_settings,
    engine_settings,
    load_model,
)
from semantic_server.http.answer_records import AnswerRecord
from semantic_server.http.app import create_app
from semantic_server.http.context import ServerContext
from semantic_server.http.lifecycle import Lifecycle
from semantic_server.http.settings import ServerSettings, load_settings
from tests.cli.support import command_line, environment, semantic
from tests.support.fake_models import FakeLoader, fake_models
from tests.support.http_server import running, until
from tests.support.lanes import more
from tests.support.model_folder import write_model

SMALL = ("--pool-blocks", "400", "--port", "0")
_SECONDS = 60.0


def test_every_setting_is_a_flag_and_every_flag_a_setting() -> None:
    assert {field.name for field in fields(ServeOptions)} == set(ServerSettings.model_fields)


def test_others_may_not_reach_a_server_without_keys() -> None:
    ran = semantic("serve", "--host", "0.0.0.0")
    assert ran.code == 2
    assert len(ran.error_lines) == 1
    assert "0.0.0.0" in ran.err
    assert "--api-key" in ran.err


@pytest.mark.process
def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = semantic("serve", "--port", str(port))
    assert ran.code == 4
    assert len(ran.error_lines) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose" in ran.err


def test_a_host_that_does_not_exist_is_one_line() -> None:
    ran = semantic("serve", "--host", "no such host", "--api-key", "k")
    assert (ran.code, len(ran.error_lines)) == (4, 1)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--port", "70000", "port (flag): expected less than or equal to 65535"),
        ("--log-format", "xml", "log_format (flag): expected 'text' or 'json'"),
        ("--api-key", "two words ", "api_keys (flag): expected printable ASCII"),
        ("--max-body-mb", "0", "max_body_mb (flag): expected greater than 0"),
        ("--config", "nowhere.toml", "file not found"),
    ],
)
def test_a_wrong_flag_is_one_line_that_says_what_was_expected(
    flag: str, value: str, words: str
) -> None:
    ran = semantic("serve", flag, value)
    assert (ran.code, len(ran.error_lines)) == (2, 1)
    assert words in ran.err
    assert "two words" not in ran.err


@pytest.mark.process
def test_a_model_that_is_not_there_ends_the_server(tmp_path: Path) -> None:
    ran = semantic("serve", *SMALL, "--no-store", "--model", str(tmp_path / "none"))
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert ran.error_lines[-1].startswith("error: ")


@pytest.fixture
def hangups() -> Iterator[None]:
    """A suite that nohup started ignores them, and so would the programs that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.exact
@pytest.mark.process
@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGHUP, signal.SIGTERM),
        *more((signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_ends_it_in_good_order_and_the_agent_is_there_again(
    tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    store = ("--store", str(tmp_path / "store"))
    answers = []
    for sent in signals:
        with _server(*store) as (process, url):
            answers.append(_complete(url))
            process.send_signal(sent)
            _, err = process.communicate(timeout=_SECONDS)
        assert process.returncode == 0
        assert err.splitlines()[-1] == "stopped"
    first, again = answers
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.process
def test_a_server_says_where_it_is_as_often_as_it_is_asked_and_goes_on() -> None:
    """Threads run while their stacks are read: hundreds of signals meet them everywhere."""
    stacks: list[str] = []
    with _server("--no-store") as (process, url), ThreadPoolExecutor() as threads:
        assert process.stderr is not None
        threads.submit(stacks.extend, process.stderr)
        first = _complete(url)["choices"]
        answers = [threads.submit(_complete, url) for _ in range(4)]
        for _ in range(200):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.002)
        assert [answer.result()["choices"] for answer in answers] == 4 * [first]
        process.terminate()
        assert process.wait(_SECONDS) == 0
    assert any("step_loop.py" in line for line in stacks)


@pytest.mark.process
def test_a_second_signal_ends_it_at_once_and_keys_and_prompts_are_in_no_line(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\nprivate-key\n")
    key = {"x-api-key": "private-key"}
    options = ("--api-key-file", str(keys), "--log-format", "json", "--stop-timeout", "60")
    with _server("--no-store", *options) as (process, url):
        found = _complete(url, key)
        body = b'{"model":"default","prompt":"a","max_tokens":4000,"ignore_eos":true,"stream":true}'
        request = urllib.request.Request(f"{url}/v1/completions", body, key)
        with urllib.request.urlopen(request, timeout=_SECONDS) as stream:
            stream.readline()
            process.send_signal(signal.SIGINT)
            until(lambda: not listens(url))
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=_SECONDS)
            assert process.returncode == 130
    text = found["choices"][0]["text"]
    assert "private-key" not in out + err
    assert "Once upon" not in out + err
    assert text.strip()
    assert text not in out + err
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    (line,) = [one for one in lines if one.get("route") == "POST /v1/completions"]
    assert (line["status"], line["model"], line["finish"]) == (200, "semantic-tiny", "length")


def listens(url: str) -> bool:
    """Whether the server takes connections: a signal ends that first. One that is in the queue of
    connections when it ends is reset."""
    host, _, port = url.removeprefix("http://").partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    return True


def test_a_bar_is_there_while_a_prompt_is_computed_and_shows_no_markup() -> None:
    progress = Progress(console=Console(file=io.StringIO(), force_terminal=True))
    bars = ServerProgress(progress)
    bars.accepted("u", "[red]me\x1b", 100)
    bars.accepted("v", "other", 100)
    bars.prefilled("u", 10, 99)
    bars.prefilled("v", 20, 99)
    assert [(task.description, task.completed) for task in progress.tasks] == [
        ("prefill (red]me", 10),
        ("prefill other", 20),
    ]
    bars.first_token("u")
    assert len(progress.tasks) == 1
    bars.finished("v", AnswerRecord())
    assert (progress.tasks, progress.live.is_started) == ([], False)


def test_other_options_may_stand_before_the_command() -> None:
    ran = semantic("--model", "some/model", "config", "show", "--json")
    assert json.loads(ran.out)["model"] == {"value": "some/model", "origin": "flag"}


@contextmanager
def _server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is ready; killed if the block leaves it running."""
    process = subprocess.Popen(
        command_line("serve", *SMALL, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | {"SEMANTIC_TEMPERATURE": "0"},
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.match(r"ready: (http://[\d.:]+)/v1 ", line):
                yield process, found[1]
                return
        raise AssertionError(f"the server did not become ready: {lines}")
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _complete(url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    body = {"model": "default", "prompt": "Once upon " * 300, "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), headers or {}
    )
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_server_that_is_ready_names_all_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        _print_ready("host:1", fake_models(FakeLoader(), "a", "a+sql", "b")[1])

    asyncio.run(work())
    assert capsys.readouterr().err.endswith(
        "ready: http://host:1/v1 serves a with 512 tokens of context, and a+sql, b\n"
        "http://host:1 is its page; semantic launch AGENT connects; Ctrl-C stops it\n"
    )


def test_several_models_are_one_setting(tmp_path: Path) -> None:
    ran = semantic("config", "show", "--model", "a", "--model", "b", "--json")
    assert json.loads(ran.out)["model"] == {"value": ["a", "b"], "origin": "flag"}
    file = tmp_path / "config.toml"
    file.write_text('model = ["a", "b"]\nkept_models = ["b"]\nmodels_gb = 2\n')
    shown = json.loads(semantic("config", "show", "--config", str(file), "--json").out)
    assert shown["model"]["value"] == ["a", "b"]
    assert shown["kept_models"]["value"] == ["b"]


def test_parsers_are_those_of_the_first_model() -> None:
    named = ServerSettings(tool_call_parser="mistral", reasoning_parser="none")
    first = _serve_settings(named, Settings(model="a"))
    assert (first.parsers.calls, first.parsers.reasoning) == ("mistral", "none")
    second = _of_model(first, "b", named)
    assert (second.parsers.calls, second.parsers.reasoning) == (None, None)
    with pytest.raises(InvalidRequestError, match=r"tool_call_parser must be one of .*kimi_k2"):
        _serve_settings(ServerSettings(tool_call_parser="kimi"), Settings())


def test_each_model_has_its_own_bits() -> None:
    given = ServerSettings(model=("semantic-tiny", "b"), kv_bits=("8", "b=auto"))
    first = _serve_settings(given, engine_settings(given))
    assert first.engine.kv_bits == 8
    assert _of_model(first, "b", given).engine.kv_bits == 16
    for bits, expected in ((("int8",), 8), (("semantic-tiny=8",), 8), (("16",), 16), ((), 16)):
        assert engine_settings(ServerSettings(kv_bits=bits)).kv_bits == expected


@pytest.mark.parametrize("name", ["chat", "semantic-tiny"])
def test_bits_may_name_a_model_by_each_of_its_names(name: str) -> None:
    models, served = ("semantic-tiny", "b"), ("chat",)
    given = ServerSettings(model=models, served_model_name=served, kv_bits=(f"{name}=8",))
    engine = engine_settings(given)
    assert engine.kv_bits == 8
    assert _of_model(_serve_settings(given, engine), "b", given).engine.kv_bits == 16


@pytest.mark.process
@pytest.mark.parametrize("ttl", [None, 60.0])
def test_any_name_means_the_loaded_model(ttl: float | None) -> None:
    """Also a model that unloads."""
    given = ServerSettings(any_model_name=True, model_ttl=ttl, pool_blocks=64, no_store=True)
    context = ServerContext()
    app = create_app(
        settings=given, context=context, lifecycle=Lifecycle(context, lambda: load_model(given))
    )
    with running(app=app) as server:
        until(lambda: server.ask("GET", "/ready").status == 200)
        asked = {"model": "gpt-9", "prompt": "Once", "max_tokens": 1}
        reply = server.ask("POST", "/v1/completions", asked)
    assert (reply.status, reply.json["model"]) == (200, "gpt-9")


@pytest.mark.parametrize("line", ["kv_bits = 8", 'kv_bits = "8"', 'kv_bits = ["8"]'])
def test_bits_in_a_file_may_be_a_number(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(line, encoding="utf-8")
    assert engine_settings(load_settings({}, file).settings).kv_bits == 8
    monkeypatch.setenv("SEMANTIC_KV_BITS", "auto, semantic-tiny=8")
    assert engine_settings(load_settings({}, file).settings).kv_bits == 8
    monkeypatch.setenv("SEMANTIC_KV_BITS", "auto")
    assert engine_settings(load_settings({}, file).settings).kv_bits == 16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("4", "must be 8 or 16, or int8 or auto, got '4'; fewer bits than 8 change reasoning"),
        ("fp8", "must be 8 or 16, or int8 or auto, got 'fp8'$"),
        ("other=8", "other=8: NAME must be one of semantic-tiny$"),
    ],
)
def test_other_bits_are_refused_by_name(given: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        engine_settings(ServerSettings(kv_bits=(given,)))


@pytest.mark.process
def test_several_models_swap_in_a_process_and_a_signal_during_a_load_ends_it(
    tmp_path: Path,
) -> None:
    folders = [write_model(tmp_path / name, name) for name in ("glm47", "mistral")]
    names = [argument for one in folders for argument in ("--model", str(one))]
    budget = ("--pool-gb", "0.01", "--ram-gb", "0.0625", "--models-gb", "0.075")

    def complete(url: str, name: str) -> object:
        body = json.dumps({"model": name, "prompt": "hi", "max_tokens": 2}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            return json.load(response)["model"]

    def complete_or_end(url: str) -> None:
        with suppress(OSError):  # the server ends before it answers
            complete(url, "glm47")

    with _server(*names, *budget, "--no-store") as (process, url):
        asked = ("mistral", "glm47", "mistral")
        assert [complete(url, name) for name in asked] == list(asked)
        with urllib.request.urlopen(f"{url}/v1/models", timeout=_SECONDS) as response:
            states = {one["id"]: one["state"] for one in json.load(response)["data"]}
        assert states == {"glm47": "unloaded", "default": "unloaded", "mistral": "loaded"}
        asking = threading.Thread(target=complete_or_end, args=(url,))
        asking.start()
        process.send_signal(signal.SIGTERM)
        assert process.wait(_SECONDS) == 0
        asking.join(_SECONDS)
