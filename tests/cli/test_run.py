"""`semantic run`: answers on stdout, everything as JSON, clear errors, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from semantic.adapters.mlx.model.provider import find_folder
from semantic.cli.progress import ProgressBar
from semantic.cli.run import Job, JsonLines, answer, read_jobs
from semantic.domain.errors import BackendError, InvalidRequestError
from semantic.domain.value_objects import SamplingParams
from tests.cli.support import command_line, environment, fake_app, process, semantic
from tests.support.adapter_folder import write_adapter

SUM = "What is 3 plus 4?"
ANSWER = "3 plus 4 is 7."
DEFAULTS = Job("run", None, (), 8, SamplingParams())


def requests(folder: Path, *lines: object) -> str:
    file = folder / "requests.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts), encoding="utf-8")
    return str(file)


@pytest.mark.process
def test_the_answer_and_nothing_else_goes_to_stdout_and_torch_is_not_loaded(tmp_path: Path) -> None:
    """transformers imports torch if it finds it, which takes seconds; the answer needs none of
    it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (tmp_path / "torch-2.9.0.dist-info").mkdir()
    (tmp_path / "torch-2.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n"
    )
    paths = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    ran = process("run", SUM, PYTHONPATH=paths)
    assert (ran.code, ran.out, ran.err) == (0, f"{ANSWER}\n", "")


def test_a_dash_reads_the_prompt_from_stdin() -> None:
    assert semantic("run", "-", stdin=f"{SUM}\n").out == f"{ANSWER}\n"


@contextmanager
def piped(text: str) -> Iterator[int]:
    """A pipe with `text` in it, and its writing end still open."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    with os.fdopen(reader) as stdin, mock.patch("sys.stdin", stdin):
        yield writer


def prompts(given: str | None) -> list[str | None]:
    return [job.prompt for job in read_jobs(given, None, DEFAULTS)]


@pytest.mark.parametrize(
    ("given", "found"), [(None, "b\nc"), ("-", "b\nc"), ("a", "a\n\nb\nc"), ("", "b\nc")]
)
def test_a_piped_text_is_the_prompt_or_follows_it(
    given: str | None, found: str, tmp_path: Path
) -> None:
    with piped("b\nc\n") as writer:
        os.close(writer)
        assert prompts(given) == [found]
    file = tmp_path / "text"
    file.write_text("b\nc\n")
    with file.open() as stdin, mock.patch("sys.stdin", stdin):
        assert prompts(given) == [found]


def test_an_empty_pipe_adds_nothing() -> None:
    with piped("") as writer:
        os.close(writer)
        assert prompts("a") == ["a"]
        with pytest.raises(InvalidRequestError, match="the prompt is empty"):
            prompts(None)


def test_an_open_pipe_that_nothing_writes_to_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Python or Node program may start a run with such a pipe, as a runner of checks does."""
    monkeypatch.setattr("semantic.cli.run._SILENT_SECONDS", 0.0)
    with piped("") as writer:
        assert prompts("a") == ["a"]
        os.close(writer)
    assert capsys.readouterr().err.startswith("stdin was silent for 0 s, so only PROMPT counts; ")


def test_another_stdin_is_no_prompt() -> None:
    far, near = os.openpty()
    with os.fdopen(near) as terminal, Path(os.devnull).open() as nothing:
        for stdin in (terminal, nothing, None):
            with mock.patch("sys.stdin", stdin):
                assert prompts("a") == ["a"]
                with pytest.raises(InvalidRequestError, match="expected a PROMPT, a text in stdin"):
                    prompts(None)
    os.close(far)


def test_json_holds_everything_about_the_answer() -> None:
    ran = semantic("run", SUM, "--json", "--max-tokens", "5")
    document = json.loads(ran.out)
    assert set(document) == {
        "agent", "model", "text", "tokens", "finish_reason", "error", "usage", "timings", "match"
    }  # fmt: skip
    assert set(document["match"]) == {
        "prompt_tokens", "reused_tokens", "end", "source", "differs_at", "expected", "got",
        "seconds", "computed_tokens", "lost", "any_chip",
    }  # fmt: skip
    assert document["finish_reason"] == "length"
    assert len(document["tokens"]) == document["usage"]["generated_tokens"] == 5
    assert set(document["usage"]) == {
        "prompt_tokens", "cached_tokens", "generated_tokens", "blocks", "bytes"
    }  # fmt: skip
    assert document["timings"]["ttft_seconds"] <= document["timings"]["total_seconds"]
    assert document["timings"]["decode_tokens_per_second"] > 0


def test_an_adapter_makes_another_model_of_the_same(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql", find_folder("semantic-tiny"))
    asked = ("run", SUM, "--json", "--max-tokens", "5", "--no-store")
    plain, other = (
        json.loads(semantic(*asked, *more).out) for more in ((), ("--adapter", str(adapter)))
    )
    assert (plain["model"], other["model"]) == ("semantic-tiny", "semantic-tiny+sql")
    assert plain["tokens"] != other["tokens"]
    wrong = semantic(*asked, "--adapter", f"other+sql={adapter}")
    assert wrong.code == 2
    assert wrong.error_lines == [
        f"error: --adapter other+sql={adapter}: expected an adapter of semantic-tiny"
    ]


def test_the_chat_template_is_used_unless_told_otherwise() -> None:
    chat, same, raw = (
        json.loads(semantic("run", SUM, "--json", "--max-tokens", "2", *more).out)
        for more in ((), ("--chat",), ("--raw",))
    )
    assert chat["tokens"] == same["tokens"]
    assert chat["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"] + 3


def test_a_stop_string_ends_the_answer_before_it() -> None:
    ran = semantic("run", SUM, "--stop", "never", "--stop", " is")
    assert ran.out == "3 plus 4\n"


def test_a_seed_makes_sampling_repeatable() -> None:
    asked = ("run", "Tell me a long story about a fox.", "--max-tokens", "40", "--temperature", "3")
    first, again, other = (semantic(*asked, "--seed", seed).out for seed in ("7", "7", "8"))
    assert first == again
    assert first != other


def test_a_file_is_answered_in_its_order_in_one_batch(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "My name is Zoe."},
        {"role": "assistant", "content": "Nice to meet you, Zoe."},
        {"role": "user", "content": "What is my name?"},
    ]
    file = requests(
        tmp_path,
        {"agent": "long", "prompt": "Tell me a long story about a fox.", "max_tokens": 30},
        "",
        {"agent": "zoe", "messages": talk},
        {"prompt": SUM, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "seed": 1},
    )
    lines = [
        json.loads(line) for line in semantic("run", "--file", file, "--json").out.splitlines()
    ]
    assert [line["agent"] for line in lines] == ["long", "zoe", "line-4"]
    assert [line["text"] for line in lines[1:]] == ["Your name is Zoe.", ANSWER]
    assert lines[0]["timings"]["total_seconds"] >= lines[1]["timings"]["total_seconds"]
    assert semantic("run", "--file", file).out.splitlines() == [line["text"] for line in lines]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": ', "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ({}, "expected either prompt or messages"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": 3}, "prompt must be a string, got 3"),
        ({"prompt": "a", "max_tokens": "9"}, 'max_tokens must be an integer, got "9"'),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be an integer, got true"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"prompt": "a", "temperature": -1}, "temperature must be 0 or more"),
        ({"prompt": "a", "top_p": "x"}, 'top_p must be a number, got "x"'),
        ({"prompt": "a", "stop": [1]}, "stop must be a string, got 1"),
        ({"prompt": "a", "tempreature": 1}, "unknown field 'tempreature'"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": [{"role": "user"}]}, 'objects with "role" and "content"'),
        ({"messages": [{"role": "pope", "content": "a"}]}, "knows the roles"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(
    tmp_path: Path, line: object, complaint: str
) -> None:
    ran = semantic("run", "--file", requests(tmp_path, {"prompt": "Hello!"}, line))
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.error_lines) == 1
    assert ran.err.startswith("error: ")
    assert "requests.jsonl, line 2: " in ran.err
    assert complaint in ran.err


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    ran = semantic("run", "--file", requests(tmp_path, "", " "))
    assert (ran.code, ran.out) == (2, "")
    assert "contains no request" in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ((), 2, "expected a PROMPT, a text in stdin or --file"),
        (("Hello!", "--file", "x"), 2, "expected either a PROMPT"),
        (("",), 2, "the prompt is empty"),
        (("-",), 2, "the prompt is empty"),
        (("Hello!", "--max-tokens", "0"), 2, "max_tokens must be at least 1, got 0"),
        (("Hello!", "--temperature", "-1"), 2, "temperature must be 0 or more"),
        (("Hello!", "--stop", ""), 2, "stop must contain only non-empty strings"),
        (("Hello!", "--pool-gb", "0"), 2, "--pool-gb must be above 0"),
        (("Hello!", "--pool-gb", "nan"), 2, "--pool-gb must be above 0"),
        (("Hello!", "--pool-blocks", "0"), 2, "total_blocks must be at least 1"),
        (("Hello!", "--pool-blocks", "1"), 3, "Cannot allocate 10 blocks"),
        (("Hello!", "--model", "./nowhere"), 2, "no model folder './nowhere'"),
        (("--file", "no-such-file"), 2, "cannot read no-such-file"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_an_exit_code(
    arguments: tuple[str, ...], code: int, complaint: str
) -> None:
    ran = semantic("run", *arguments)
    assert (ran.code, ran.out) == (code, "")
    assert len(ran.error_lines) == 1
    assert complaint in ran.err


@pytest.mark.parametrize("config", ["", "{", "{}", '{"model_type": "llama"}'])
def test_a_broken_model_folder_is_an_error_of_the_request(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    ran = semantic("run", "Hello!", "--model", str(tmp_path))
    assert (ran.code, ran.out) == (2, "")
    assert ran.error_lines[0].startswith(f"error: cannot load the model in {tmp_path}")
    assert len(ran.error_lines) == 1


def test_a_hub_id_that_cannot_be_had_is_an_error_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ran = semantic("run", "Hello!", "--model", "no-such-owner/no-such-model")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: 'no-such-owner/no-such-model' is neither a folder")
    assert len(ran.error_lines) == 1


def test_stdin_that_is_no_text_is_refused() -> None:
    ran = semantic("run", "-", stdin=b"caf\xe9")
    assert (ran.code, ran.err) == (2, "error: stdin is not UTF-8 text: byte 0xe9 at 3\n")


def test_the_model_may_be_named_before_the_command() -> None:
    assert "no model folder './before'" in semantic("--model", "./before", "run", "Hello!").err
    both = semantic("--model", "./before", "run", "Hello!", "--model", "./after")
    assert "no model folder './after'" in both.err


@pytest.mark.process
def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(
        command_line("run", "Tell me a long story about a fox."),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(4) == b"Once"
        running.stdout.close()
        assert running.stderr.read() == b""


def test_a_failure_names_its_line_and_the_other_answers_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    app, model = fake_app()
    model.fail_next("prefill_together")
    model.fail_next("prefill")
    jobs = [
        Job(name, name * 9, (), 4, SamplingParams(), source=f"file, line {number}")
        for number, name in enumerate("ab", start=1)
    ]
    with pytest.raises(BackendError, match=r"^file, line 1: injected"):
        answer(app, jobs, JsonLines("fake"), ProgressBar(), chat=False)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["finish_reason"], first["error"]) == ("error", "injected into prefill")
    assert len(second["tokens"]) == 4
