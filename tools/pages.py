"""Fills what pages include from tested files and from the program, and checks that it is equal.

What is included stands between two marks; the first names a kind and a place:

    `<!-- include:KIND PLACE -->...<!-- /include -->`

`file` is a whole file, `part` what is between two comments of a file, `call` the expression that a
function of a test file returns, with its imports. `setup` is how `tests/agents` sets up an agent,
`settings` what `semantic launch --write` writes, `words` a command line in a constant of a test
file; `cli`, `http`, `statuses`, `families` and `models` are the references. Of tests the address
of the server, models' names and the constants of `tests.clients.talk` become what a reader types.

Run: python -m tools.pages [--check] [FILE ...]
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from semantic_server.clients.coding_agents import CLAUDE, CODEX, OPENCODE, RunningServer
from tests.agents.agents import STRANGERS
from tests.clients import talk
from tools import references

ROOT: Final = Path(__file__).resolve().parents[1]
URL: Final = "http://127.0.0.1:8000"
MODEL: Final = "default"
"""The name by which a page calls the served model."""
REGION: Final = re.compile(
    r"<!-- include:(?P<kind>[a-z]+)(?: (?P<place>\S+))? -->\n.*?<!-- /include -->", re.DOTALL
)
_LANGUAGES: Final = {".py": "python", ".cjs": "js", ".yaml": "yaml", ".json": "json"}
_CONTEXT: Final = 131_072
"""Tokens; the context of the server in settings that name one."""
_TESTED_MODELS: Final = ("one-sentence", talk.MODEL, talk.EMBEDDING_MODEL)


class PageError(Exception):
    """A mark names something that is not there."""


def filled(text: str) -> str:
    """The text of a page with all that it includes. Raises PageError."""
    return REGION.sub(_region, text)


def _region(found: re.Match[str]) -> str:
    kind, place = found["kind"], found["place"] or ""
    if kind not in _KINDS:
        raise PageError(f"expected one of {', '.join(_KINDS)}, got {kind!r}")
    mark = f"<!-- include:{kind} {place}".rstrip()
    return f"{mark} -->\n{_KINDS[kind](place)}\n<!-- /include -->"


def _whole_file(place: str) -> str:
    return _fenced(_LANGUAGES[Path(place).suffix], _read(place))


def _part(place: str) -> str:
    """`PATH::NAME`: the lines between the comments `[NAME]` and `[/NAME]`."""
    path, _, name = place.partition("::")
    found = re.search(rf"\[{name}\]\n(.*?)\n[^\n]*\[/{name}\]", _read(path), re.DOTALL)
    if found is None:
        raise PageError(f"{path} has no part {name!r}")
    return _fenced(_LANGUAGES[Path(path).suffix], found[1].replace("${url}", URL))


def _call(place: str) -> str:
    """`PATH::FUNCTION`: the returned call as an assignment to `model`, and what it imports."""
    path, _, name = place.partition("::")
    tree = ast.parse(_read(path))
    functions = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name)
    returned = next((one.body[-1] for one in functions), None)
    if not isinstance(returned, ast.Return) or not isinstance(returned.value, ast.Call):
        raise PageError(f"{path} has no function {name!r} that returns a call")
    call = _Typed().visit(returned.value)
    given = [keyword for keyword in call.keywords if keyword.arg is not None]
    lines = [f"    {keyword.arg}={_literal(keyword.value)}," for keyword in given]
    text = "\n".join((f"model = {ast.unparse(call.func)}(", *lines, ")"))
    used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    return _fenced("python", "\n".join((*_imports(tree, used), "", text)))


class _Typed(ast.NodeTransformer):
    """What a reader types in place of a test's own names."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """A constant of `talk` is its value."""
        if isinstance(node.value, ast.Name) and node.value.id == "talk":
            return ast.Constant(_typed(getattr(talk, node.attr)))
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """The server's address is the default one."""
        return ast.Constant(ast.unparse(node)[2:-1].replace("{url}", URL))


def _literal(value: ast.expr) -> str:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return json.dumps(value.value)
    return ast.unparse(value)


def _imports(tree: ast.Module, used: set[str]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names = [one.name for one in node.names if one.name in used]
            if names:
                yield f"from {node.module} import {', '.join(names)}"


def _words(place: str) -> str:
    """`PATH::NAME`: variables and the command line in constants `NAME_VARIABLES` and `NAME`."""
    path, _, name = place.partition("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    return _shell(getattr(module, f"{name}_VARIABLES"), [getattr(module, name)])


def _setup(name: str) -> str:
    """The files, variables and commands of an agent that its user sets up."""
    agent = next((one for one in STRANGERS if one.name == name), None)
    if agent is None:
        raise PageError(f"no agent {name!r} among {[one.name for one in STRANGERS]}")
    program = Path(agent.binaries[0]).name
    files = [
        f"`~/{path}`:\n\n{_fenced(_LANGUAGES[Path(path).suffix], _typed(text))}"
        for path, text in agent.files.items()
    ]
    commands = [(program, *words) for words in agent.commands]
    installed = _fenced("sh", f"npm install --global {agent.package}@{agent.version}")
    return "\n\n".join((installed, *files, _shell(agent.variables, commands)))


def _settings(name: str) -> str:
    """What is written to an agent's settings for a server with a key in the user's variable."""
    agent = {"claude": CLAUDE, "codex": CODEX, "opencode": OPENCODE}.get(name)
    if agent is None:
        raise PageError(f"no coding agent {name!r}")
    server = RunningServer(URL, MODEL, _CONTEXT, "SEMANTIC_API_KEY")
    file = agent.settings_file({"HOME": "/"}).as_posix()
    written = agent.format.change("", agent.settings(server))
    return f"`~{file}`:\n\n{_fenced(file.rpartition('.')[2], written)}"


def _shell(variables: Mapping[str, str], commands: Sequence[Sequence[str]]) -> str:
    lines = [f"export {name}={shlex.quote(_typed(value))}" for name, value in variables.items()]
    lines += [" ".join(map(_word, command)) for command in commands]
    return _fenced("sh", "\n".join(lines))


def _word(word: str) -> str:
    """A word of a command line; the home folder stays for the shell to expand."""
    typed = _typed(word)
    return typed if typed.startswith("~/") else shlex.quote(typed)


def _typed(value: str) -> str:
    """`value` with the server, home and model of a reader; what is no text stays as it is."""
    if not isinstance(value, str):
        return value
    for model in _TESTED_MODELS:
        value = value.replace(model, MODEL)
    return value.replace("{url}", URL).replace("{home}", "~")


@cache
def _openapi() -> Mapping[str, object]:
    from semantic_server.http.app import create_app

    return create_app().openapi()


def _fenced(language: str, code: str) -> str:
    return f"```{language}\n{code.strip()}\n```"


def _read(path: str) -> str:
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except OSError as error:
        raise PageError(f"cannot read {path}: {error.strerror}") from error


_KINDS: Final[Mapping[str, Callable[[str], str]]] = {
    "file": _whole_file,
    "part": _part,
    "call": _call,
    "words": _words,
    "setup": _setup,
    "settings": _settings,
    "families": lambda _: f"\n{references.families()}\n",
    "models": lambda _: f"\n{references.models()}\n",
    "cli": lambda name: f"\n{references.command_line(name)}\n",
    "http": lambda _: f"\n{references.http(_openapi())}\n",
    "statuses": lambda _: f"\n{references.statuses(_openapi())}\n",
}


def main(arguments: Sequence[str]) -> int:
    """Fill or check the pages; 1 when one differs or names something that is not there."""
    parser = argparse.ArgumentParser(prog="tools.pages", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page differs")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    wrong = 0
    for path in given.files or sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        try:
            expected = filled(text)
        except PageError as error:
            print(f"{path}: {error}", file=sys.stderr)
            wrong = 1
            continue
        if text != expected and given.check:
            print(f"{path} differs from what it includes: run python -m tools.pages")
            wrong = 1
        elif text != expected:
            path.write_text(expected, encoding="utf-8")
            print(f"{path} written")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
