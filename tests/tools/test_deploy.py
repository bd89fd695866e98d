"""What `deploy/` names exists: copied files, settings, options and commands of the program.

No container can be built and no formula installed by the tests; continuous integration builds one.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from typer.main import get_command

from semantic.cli.main import app
from semantic_server.http.settings import ServerSettings
from tools.release import ROOT, formula, supported_pythons

DEPLOY = ROOT / "deploy"
CONTAINER = DEPLOY / "Containerfile"
FORMULA = DEPLOY / "homebrew" / "semantic-engine.rb"
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
COMMANDS = set(get_command(app).commands)  # type: ignore[attr-defined]  # a group


def instructions(text: str) -> list[tuple[str, str]]:
    """(FROM, the rest of it) and so on; lines that end with a backslash are joined."""
    plain = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = plain.replace("\\\n", " ").splitlines()
    found = (line.partition(" ") for line in joined if line.strip())
    return [(word, " ".join(rest.split())) for word, _, rest in found]


INSTRUCTIONS = instructions(CONTAINER.read_text(encoding="utf-8"))


def of(kind: str) -> list[str]:
    return [rest for word, rest in INSTRUCTIONS if word == kind]


def test_every_instruction_is_one() -> None:
    known = {
        "ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK",
        "ENTRYPOINT", "CMD",
    }  # fmt: skip
    assert {word for word, _ in INSTRUCTIONS} == known


def test_what_is_copied_exists_and_is_sent_to_the_build() -> None:
    """The last rule of the ignored files that fits decides, as docker has it."""
    lines = CONTAINER.with_suffix(".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    copied = [name for rest in of("COPY") if "--from" not in rest for name in rest.split()[:-1]]
    assert "src" in copied
    for name in copied:
        assert (ROOT / name).exists(), name
        fitting = [rule for rule in rules if fnmatch(name, rule.removeprefix("!"))]
        assert fitting[-1].startswith("!"), name
    assert not [rule for rule in rules if rule.startswith("!") and rule[1:] in {"tests", ".git"}]


def test_what_hatchling_reads_is_copied() -> None:
    read = re.findall(r'"(README\.md|LICENSE)"', PROJECT)
    copied = " ".join(of("COPY"))
    assert set(read) == {"README.md", "LICENSE"}
    assert [name for name in read if name not in copied] == []


def test_the_settings_exist_and_the_server_begins_with_them() -> None:
    found = dict(pair.partition("=")[::2] for rest in of("ENV") for pair in shlex.split(rest))
    names = [name for name in found if name.startswith("SEMANTIC_")]
    assert len(names) > 1
    fields = ServerSettings.model_fields
    assert [name for name in names if name.removeprefix("SEMANTIC_").lower() not in fields] == []
    assert found["SEMANTIC_HOST"] == "0.0.0.0", "a port of the host reaches no loopback address"
    folders = [found["SEMANTIC_STORE"], found["HF_HOME"]]
    assert of("VOLUME") == ["/data"]
    assert [folder for folder in folders if not folder.startswith("/data/")] == []
    assert of("EXPOSE") == [str(fields["port"].default)]
    assert f":{fields['port'].default}/ready" in of("HEALTHCHECK")[0]


def test_it_runs_a_command_that_exists_and_not_as_root() -> None:
    assert json.loads(of("ENTRYPOINT")[0]) == ["semantic"]
    assert json.loads(of("CMD")[0])[0] in COMMANDS
    (user,) = of("USER")
    assert f"useradd --uid 10001 --create-home {user}" in " ".join(of("RUN"))
    code = json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2])[2]
    compile(code, "healthcheck", "exec")


def test_python_and_the_extras_are_those_of_the_package() -> None:
    (version,) = {rest.partition("=")[2] for rest in of("ARG") if rest.startswith("PYTHON=")}
    assert version in supported_pythons(ROOT)
    extras = [rest.partition("=")[2] for rest in of("ARG") if rest.startswith("EXTRA=")]
    said = CONTAINER.read_text(encoding="utf-8")
    assert re.search(r"EXTRA=cuda", said)
    for extra in [*extras, "cuda"]:
        assert re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE)


@pytest.mark.process
@pytest.mark.parametrize("text", of("RUN"))
def test_every_shell_line_is_one(text: str) -> None:
    subprocess.run(["sh", "-n", "-c", text], check=True)


@pytest.mark.process
def test_the_options_of_uv_exist() -> None:
    """Those of the container and those of the formula."""
    ruby = " ".join(re.findall(r'"([^"]*)"', FORMULA.read_text(encoding="utf-8")))
    lines = [*of("RUN"), ruby]
    for words in (["build"], ["venv"], ["pip", "install"]):
        said = "uv " + " ".join(words)
        used = {
            option.removesuffix("s")
            for line in lines
            for part in re.split(r"&&|\bsystem\b|(?=\buv )", line)
            if part.strip().startswith(said)
            for option in re.findall(r"(?<= )--[a-z-]+", part.partition(" semantic ")[0])
        }
        shown = subprocess.run(
            [sys.executable, "-m", "uv", *words, "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert used
        known = {option.removesuffix("s") for option in re.findall(r"--[a-z-]+", shown)}
        assert used - known == set()


# --- the formula ------------------------------------------------------------------------------


def test_the_release_fills_the_formula_in(tmp_path: Path) -> None:
    sdist = tmp_path / "semantic_engine-1.2.3.tar.gz"
    sdist.write_bytes(b"")
    home = "https://example.org/somebody/semantic"
    (written,) = formula(ROOT, tmp_path, sdist, home, "1.2.3")
    text = written.read_text(encoding="utf-8")
    assert f'url "{home}/releases/download/v1.2.3/semantic_engine-1.2.3.tar.gz"' in text
    assert 'sha256 "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"' in text
    assert re.findall(r'"@\w+@"', text) == []
    assert formula(ROOT, tmp_path, sdist, None, "1.2.3") == []


def test_the_formula_names_files_of_the_sdist_and_commands_that_exist() -> None:
    text = FORMULA.read_text(encoding="utf-8")
    files = re.findall(r'"(requirements[\w-]*\.txt)"', text)
    assert len(files) > 1
    only = PROJECT.partition("only-include = [")[2].partition("]")[0]
    assert [name for name in files if f'"{name}"' not in only or not (ROOT / name).exists()] == []
    run = re.findall(r'"semantic", "(\w+)"', text)
    assert run
    assert set(run) <= COMMANDS
    (version,) = set(re.findall(r"python@(3\.\d+)", text))
    assert version in supported_pythons(ROOT)


def style(text: str) -> list[str]:
    """What `brew style` would say of a formula, as far as its rules are known here."""
    order = (
        *("desc", "homepage", "url", "sha256", "license", "depends_on", "preserve_rpath"),
        *("def", "service", "test"),
    )
    stanzas = re.findall(r"^  ([a-z]\w*)(?<!end)\b", text, re.MULTILINE)
    (desc,) = re.findall(r'^  desc "(.*)"$', text, re.MULTILINE)
    needed = re.findall(r'^  depends_on "?([\w@.-]+)"?(.*)$', text, re.MULTILINE)
    sorted_needs = sorted(needed, key=lambda one: (":build" not in one[1], one[0].lower()))
    found = {
        "stanzas": sorted(stanzas, key=order.index) != stanzas or set(order) != set(stanzas),
        "dependencies": sorted_needs != needed,
        "desc": len(desc) > 80
        or not re.match(r"(?!(The|An?|Semantic.?[Ee]ngine)\b)[A-Z].*[^.\s]$", desc),
        "paths": re.search(r'Formula\["[^"]+"\]\.opt_', text) is not None,
        "lines": any(len(line) > 118 or line != line.rstrip() for line in text.splitlines()),
    }
    return [name for name, wrong in found.items() if wrong]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", []),
        ('desc "Many', 'desc "A model for many', ["desc"]),
        ('desc "Many', 'desc "many', ["desc"]),
        ('computed twice"', 'computed twice."', ["desc"]),
        ('computed twice"', 'computed twice by any of them"', ["desc"]),
        ('  license "Apache-2.0"\n', "", ["stanzas"]),
        ("  preserve_rpath\n", '  preserve_rpath\n  license "MIT"\n', ["stanzas"]),
        ('"uv" => :build', '"uv"', ["dependencies"]),
        ('which("python3.13")', 'Formula["python@3.13"].opt_bin/"python3.13"', ["paths"]),
    ],
)
def test_the_formula_has_the_style_of_homebrew(old: str, new: str, said: list[str]) -> None:
    text = FORMULA.read_text(encoding="utf-8")
    assert old in text
    assert style(text.replace(old, new, 1)) == said


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ruby") is None, reason="needs Ruby")
def test_the_formula_is_ruby() -> None:
    subprocess.run(["ruby", "-c", str(FORMULA)], check=True, stdout=subprocess.DEVNULL)
