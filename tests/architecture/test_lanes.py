"""Tests that start processes, servers or threads carry the marker `process`; none is forgotten.

It follows names through the text of the test modules, fixtures included; nothing is imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PROCESS: Final = "pytest.mark.process"
STARTERS: Final = (
    "asyncio.create_subprocess_exec",
    "asyncio.start_server",
    "http.server",
    "multiprocessing",
    "os.fork",
    "os.posix_spawn",
    "playwright",
    "pty",
    "semantic.AsyncEngine",
    "semantic.Engine",
    "semantic_server.http.server",
    "semantic.adapters.mlx.sampling.grammar_process.GrammarProcess",
    "semantic_fleet.kv_publisher.KVPublisher",
    "semantic.application.engine.engine_thread.EngineThread",
    "semantic.library",
    "semantic.serve.load_serving",
    "semantic.serve_models.load_models",
    "socket",
    "socketserver",
    "subprocess",
    "threading.Thread",
    "threading.Timer",
    "time.sleep",
)
"""Modules and names that start a process, a server or a thread, or wait for one."""
APART: Final = ("tests.agents.", "tests.clients.")
"""Tests of other programs, which have runners of their own."""

Name: TypeAlias = tuple[str, str]
"""A module with its dots, and a name that it defines."""


@dataclass(frozen=True)
class Module:
    """A module's definitions by name: the dotted names in each, and its decorators as text."""

    defined: dict[str, set[str]]
    marks: dict[str, list[str]]
    imported: dict[str, str]
    """The dotted name of what is imported. No tree is kept: they are large."""

    @classmethod
    def read(cls, text: str) -> Module:
        """Parse a module. Only its top level defines names."""
        found = cls({}, {}, {})
        for statement in ast.parse(text).body:
            nodes = _nodes(statement)
            found.imported.update(pair for node in nodes for pair in _imports(node))
            for name in _defines(statement):
                found.defined.setdefault(name, set()).update(*map(_mentions, nodes))
                found.marks.setdefault(name, []).extend(_marks(statement))
        return found

    def uses(self, name: str) -> set[str]:
        """Names that a definition mentions: dotted ones of imports, `.name` of this module."""
        found = set()
        for head, rest in map(_split, self.defined[name]):
            if head in self.imported:
                found.add(self.imported[head] + rest)
            elif head in self.defined:
                found.add(f".{head}")
        return found

    @cached_property
    def for_every_test(self) -> list[str]:
        """Fixtures that all of its tests use."""
        return [name for name in self.defined if any("autouse=True" in d for d in self.marks[name])]

    @cached_property
    def is_marked(self) -> bool:
        """Whether the whole module carries the marker."""
        return any(PROCESS in mark for mark in self.marks.get("pytestmark", []))


def unmarked(modules: Mapping[str, Module]) -> list[str]:
    """Tests that start something and do not carry the marker."""
    starting = _starting(modules)
    return [
        f"{path}.{name}"
        for path, module in modules.items()
        for name in module.defined
        if name.lower().startswith("test") and not module.is_marked
        if not any(PROCESS in mark for mark in module.marks[name])
        if starting & {(path, used) for used in (name, *module.for_every_test)}
    ]


def _starting(modules: Mapping[str, Module]) -> set[Name]:
    """The definitions that reach one of `STARTERS`."""
    used = {
        (path, name): module.uses(name)
        for path, module in modules.items()
        for name in module.defined
    }
    reached = {name: {_place(name[0], one, modules) for one in ones} for name, ones in used.items()}
    found = {name for name, ones in used.items() if any(map(_is_starter, ones))}
    while more := {name for name, ones in reached.items() if ones & found} - found:
        found |= more
    return found


def _is_starter(used: str) -> bool:
    return any(used == one or used.startswith(f"{one}.") for one in STARTERS)


def _place(path: str, used: str, modules: Mapping[str, Module]) -> Name:
    """The module and the name in it that `used` stands for in the module `path`."""
    if used.startswith("."):
        return path, used[1:]
    parts = used.split(".")
    ends = (end for end in range(len(parts) - 1, 0, -1) if ".".join(parts[:end]) in modules)
    end = next(ends, 0)
    return (".".join(parts[:end]), parts[end])


def _defines(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (one.id for one in targets if isinstance(one, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case _:
            pass


def _marks(statement: ast.stmt) -> list[str]:
    """The decorators of a function or class as text, or the marks of a module."""
    match statement:
        case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
            return [ast.unparse(value)]
        case _:
            return [ast.unparse(one) for one in getattr(statement, "decorator_list", [])]


def _nodes(top: ast.AST) -> list[ast.AST]:
    """All that is below a node, without contexts, which say only whether a name is read."""
    found = [top]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, list):
                found += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                found.append(value)
    return found


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names=names):
            for one in names:
                yield (one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2
        case ast.ImportFrom(module=str(module), names=names):
            yield from ((one.asname or one.name, f"{module}.{one.name}") for one in names)
        case _:
            pass


def _dotted(node: ast.AST) -> str:
    """The text of a name, of names joined by dots, or of an argument, which may be a fixture."""
    match node:
        case ast.Name(id=name) | ast.arg(arg=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            head = _dotted(value)
            return f"{head}.{attr}" if head else ""
        case _:
            return ""


def _mentions(node: ast.AST) -> list[str]:
    """The dotted name that a node is, or the fixtures that it names."""
    dotted = _dotted(node)
    return [dotted] if dotted else _fixtures(node)


def _fixtures(node: ast.AST) -> list[str]:
    """The names in a mark `usefixtures`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="usefixtures"), args=arguments):
            return [str(one.value) for one in arguments if isinstance(one, ast.Constant)]
        case _:
            return []


def _split(dotted: str) -> tuple[str, str]:
    head, dot, rest = dotted.partition(".")
    return head, dot + rest


SUPPORT = """
import subprocess, threading
from contextlib import contextmanager
import pytest

@pytest.fixture
def started(): return subprocess.run(["true"])
def locked(): return threading.Lock()
"""
TESTS = """
import pytest
from tests.support.planted import started, locked

@pytest.fixture
def server(started): return started
def helper(): return locked()

def test_of_a_fixture(server): pass
def test_of_a_lock(): helper()
@pytest.mark.process
def test_marked(started): pass
@pytest.mark.usefixtures("server")
def test_that_uses_a_fixture(): pass
"""


def test_a_test_that_starts_something_by_a_fixture_is_found() -> None:
    planted = {"tests.support.planted": SUPPORT, "tests.test_planted": TESTS}
    modules = {name: Module.read(text) for name, text in planted.items()}
    found = [name.rpartition(".")[2] for name in unmarked(modules)]
    assert found == ["test_of_a_fixture", "test_that_uses_a_fixture"]


def test_each_test_that_starts_something_is_in_the_process_lane() -> None:
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    modules = {name: Module.read(path.read_text("utf-8")) for name, path in names.items()}
    assert [name for name in unmarked(modules) if not name.startswith(APART)] == []


@pytest.mark.process
def test_tests_that_the_gate_does_not_run_can_be_collected() -> None:
    """They import modules and read pages, which a change may have moved."""
    folders = [f"tests/{name}" for name in ("agents", "fleet", "gpu", "page", "real")]
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [*command, *folders], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
