"""Every program in `examples` runs with the model inside the package, and caches what it says."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semantic.composition.engine_settings import DEFAULT_MODEL
from tests.support.http_server import RunningServer
from tests.support.served_store import served

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60
SHARE = re.compile(r"(\d+) of (\d+) prompt tokens were cached")

Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs an example's `main` and returns what it and its processes printed."""

    def run_main(name: str, *arguments: str) -> str:
        importlib.import_module(f"examples.{name}").main(*arguments)
        return capfd.readouterr().out

    return run_main


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the model inside the package."""
    with served(tmp_path_factory.mktemp("served"), Path(DEFAULT_MODEL)) as running:
        yield running


def shares(printed: str) -> list[float]:
    """The cached part of each prompt, in the order in which they were printed."""
    return [int(cached) / int(prompt) for cached, prompt in SHARE.findall(printed)]


def test_three_agents_debate_after_one_briefing(run: Run) -> None:
    found = shares(run("debate"))
    assert found[0] == 0
    assert len(found) == 7
    assert min(found[1:4]) > 0.95
    assert min(found[4:]) > 0.8


def test_a_fork_answers_after_its_own_hypothesis_only(run: Run) -> None:
    printed = run("fork_per_hypothesis")
    assert "moved: 'You live in Rome.'" in printed
    assert "renamed: 'Your name is Vera.'" in printed
    assert "unchanged: 'Your name is Ada. You live in Oslo.'" in printed
    assert min(shares(printed)) > 0.7


def test_a_document_is_computed_once_for_twenty_readers(run: Run) -> None:
    printed = run("long_document")
    assert "reader-0: 'Your name is Ada.'" in printed
    assert re.search(r"20 agents: 9\d% of \d{5} prompt tokens were cached", printed)


@pytest.mark.process
def test_a_killed_process_is_continued_from_disk() -> None:
    # This process may compute with another BLAS than new ones do, and would find nothing of theirs.
    path = ROOT / "examples" / "resume_after_restart.py"
    done = subprocess.run((sys.executable, path), capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.endswith("(0 of 598 prompt tokens were cached, from none)")
    assert second.endswith(
        ": 'Your name is Ada.' (602 of 610 prompt tokens were cached, from disk)"
    )
    assert first.partition(":")[0] != second.partition(":")[0]


@pytest.mark.process
def test_subagents_begin_with_what_their_parent_has_read(run: Run, server: RunningServer) -> None:
    printed = run("subagent_tree", server.url)
    assert min(shares(printed)[1:]) > 0.9
    tree = [line.partition(" (")[0] for line in printed.splitlines()[-4:]]
    assert tree == ["lead", "  docs", "  tests", "    browser"]
    assert run("subagent_tree", server.url).splitlines()[-4:] == printed.splitlines()[-4:]


def test_a_batch_file_is_answered_in_its_order(run: Run, tmp_path: Path) -> None:
    prompts = ("Count from 1 to 9.", "What is 3 plus 4?")
    lines = [json.dumps({"agent": f"a{i}", "prompt": text}) for i, text in enumerate(prompts)]
    (tmp_path / "batch.jsonl").write_text("\n".join(lines) + "\n")
    answers = [
        json.loads(line) for line in run("batch_file", f"{tmp_path}/batch.jsonl").split("\n")[:2]
    ]
    assert [one["text"] for one in answers] == ["1, 2, 3, 4, 5, 6, 7, 8, 9.", "3 plus 4 is 7."]
    assert [one["agent"] for one in answers] == ["a0", "a1"]


def test_a_batch_file_is_there_for_a_first_try(run: Run) -> None:
    answers = [json.loads(line) for line in run("batch_file").splitlines()]
    assert [one["agent"] for one in answers] == ["ada", "ben", "eve"]
    assert {one["reason"] for one in answers} == {"stop"}


def test_an_evaluation_shares_its_prefix(run: Run) -> None:
    assert run("evaluation") == "12 of 12 right; 99% of the prompt tokens were cached\n"


@pytest.mark.process
def test_a_streamed_chat_goes_on_from_its_cache(
    run: Run, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(("My name is Ada.", "What is my name?", ""))
    monkeypatch.setattr("builtins.input", lambda _: next(typed))
    printed = run("streaming_chat", server.url)
    assert printed.startswith("Nice to meet you, Ada.\n(0 of 8 prompt tokens were cached)\n")
    assert "Your name is Ada.\n(16 of 24 prompt tokens were cached)\n" in printed


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_chat_ends_with_its_input(
    end: type[BaseException], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed(_: str) -> str:
        raise end

    monkeypatch.setattr("builtins.input", typed)
    assert run("streaming_chat") == "\n"


@pytest.mark.process
@pytest.mark.parametrize("name", ["streaming_chat", "structured_output", "subagent_tree"])
def test_without_a_server_an_example_ends_with_one_line(name: str) -> None:
    path, url = ROOT / "examples" / f"{name}.py", "http://127.0.0.1:1"
    done = subprocess.run(
        (sys.executable, path, url), input="Hello\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "cannot get an answer from `semantic serve`: Connection error.\n"


@pytest.mark.process
def test_a_structured_answer_is_the_same_from_the_cache(run: Run, server: RunningServer) -> None:
    first, second = run("structured_output", server.url).splitlines()
    assert first.startswith("Report(city='")
    assert second.partition(" (")[0] == first.partition(" (")[0]
    assert shares(first) == [0]
    assert shares(second)[0] > 0.9


def test_an_agent_moves_to_another_store(run: Run) -> None:
    printed = run("pin_and_export")
    assert "pinned: True; " in printed
    assert "ada-moved: 'Your name is Ada.' (602 of 610 prompt tokens were cached)" in printed


def test_the_notebook_prints_what_is_stored_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((ROOT / "examples" / "agents.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    printed = []
    for cell in cells:
        if cell["cell_type"] == "code":
            capsys.readouterr()
            exec("".join(cell["source"]), names)
            stored = "".join(text for output in cell["outputs"] for text in output["text"])
            printed.append(stored)
            assert capsys.readouterr().out == stored
    assert sum(bool(text) for text in printed) > 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_shows(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < MOST_LINES
    header = ast.get_docstring(ast.parse(text)) or ""
    lines = [line for line in header.splitlines() if line]
    assert len(lines) == 3
    assert lines[2].startswith(f"Run: python examples/{path.name}")


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert len(EXAMPLES) == 10
    named = (f'run("{path.stem}"' in here or f'"{path.name}"' in here for path in EXAMPLES)
    assert all(named)
