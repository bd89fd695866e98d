"""Rules of the house that no linter knows, each with a proof that it can fire.

They read files as text or syntax trees; nothing of `semantic` is imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "semantic"
MODULES = sorted(SOURCE.parent.rglob("*.py"))
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

RELAXED = ("tests/", "examples/", "experiments/", "benchmarks/", "tools/")
PORT_USERS = ("application/", "adapters/", "cli/", "composition/", "bootstrap.py", "semantic_")

# Joined here so that this file does not hold the names it forbids.
REGISTRIES = [
    ".".join(labels)
    for labels in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("debian", "org"),
        ("ubuntu", "com"),
        ("crates", "io"),
        ("pytorch", "org", "whl"),
    )
]
MACHINE_PATH = re.compile(
    r"(?<![\w.$})~/-])/(?:work|farm|tmp|root|home/\w+|Users/\w+|private/var)(?![\w-])"
)
SILENCED_FILE = re.compile(
    r"^\s*#\s*(?:ruff: noqa|mypy: |type: ignore|flake8: noqa|fmt: off)", re.MULTILINE
)

MOST_IN_FOLDER = 20

WIRES = re.compile(
    r"^semantic_server/http/(?:anthropic|ollama|openai(?:/(?:chat|completions|responses))?)/"
)
KV_CACHES = re.compile(r"^adapters/mlx/kv_cache/(?:contiguous|paged)/")
LAYERS = re.compile(
    r"^(?:(?:semantic_\w+/)?cli|ports|domain|application|semantic_server/http|adapters/stores/disk)"
    r"/[^/]+$|^serve"
)
"""Places that have the same thing in their own form: a port, its domain types, its command."""

# --- what each rule looks for -----------------------------------------------------------------


def protocols(tree: ast.Module) -> set[str]:
    """Names of the classes that derive from Protocol directly."""
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {node.name for node in classes if any(_is_protocol(base) for base in node.bases)}


def annotated_names(tree: ast.Module) -> set[str]:
    """Every name that occurs inside an annotation, also in one written as a string."""
    return {name for annotation in _annotations(tree) for name in _names(annotation)}


def broad_handlers(tree: ast.Module) -> list[int]:
    """Lines of handlers that catch everything: bare, or (Base)Exception alone or in a tuple."""
    handlers = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    return [node.lineno for node in handlers if _is_broad(node.type)]


def foreign_addresses(text: str) -> list[str]:
    """Registry hosts and absolute paths of one machine in a text."""
    hosts = [host for host in REGISTRIES if host in text.lower()]
    return hosts + [match[0] for match in MACHINE_PATH.finditer(text)]


def crowded(paths: list[str]) -> dict[str, int]:
    """Folders with more than `MOST_IN_FOLDER` modules of their own."""
    sizes = Counter(path.rpartition("/")[0] for path in paths)
    return {folder: n for folder, n in sizes.items() if n > MOST_IN_FOLDER}


def namesakes(paths: list[str]) -> dict[str, list[str]]:
    """Modules of one name that are not the same thing of two wires, caches or layers."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        if not path.endswith("__init__.py"):
            by_name.setdefault(path.rpartition("/")[2], []).append(path)
    places = (WIRES, KV_CACHES, LAYERS)
    return {
        name: alike
        for name, alike in by_name.items()
        if len(alike) > 1 and not all(any(one.match(path) for one in places) for path in alike)
    }


def _is_protocol(base: ast.expr) -> bool:
    inner = base.value if isinstance(base, ast.Subscript) else base
    name = inner.attr if isinstance(inner, ast.Attribute) else getattr(inner, "id", None)
    return name == "Protocol"


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(one) for one in caught.elts)
    return caught is None or (
        isinstance(caught, ast.Name) and caught.id in {"Exception", "BaseException"}
    )


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case (
                ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.expr() as annotation)
            ):
                yield annotation
            case (
                ast.FunctionDef(returns=ast.expr() as annotation)
                | ast.AsyncFunctionDef(returns=ast.expr() as annotation)
            ):
                yield annotation
            case _:
                pass


def _names(annotation: ast.expr) -> Iterator[str]:
    for node in ast.walk(annotation):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)):
                yield from re.findall(r"\w+", text)
            case _:
                pass


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=_short(path))


def _short(path: Path) -> str:
    base = SOURCE if path.is_relative_to(SOURCE) else SOURCE.parent
    return path.relative_to(base).as_posix()


def _kept_files() -> list[Path]:
    """Files that git tracks or would track; in a copy without a repository, all visible ones."""
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-zco", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [ROOT / name for name in listing.stdout.split("\0") if name]
    paths = names if listing.returncode == 0 else [*ROOT.glob("[!.]*"), *ROOT.glob("[!.]*/**/*")]
    return [path for path in paths if path.is_file()]


def _text(path: Path) -> str:
    """The text of a file; weights and other binary files have none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


# --- the rules --------------------------------------------------------------------------------


def test_no_lint_rule_is_switched_off_for_source_files() -> None:
    ignored = CONFIG["tool"]["ruff"]["lint"].get("per-file-ignores", {})
    assert [path for path in ignored if not path.startswith(RELAXED)] == []
    assert "exclude" not in CONFIG["tool"]["ruff"]
    assert "extend-exclude" not in CONFIG["tool"]["ruff"]


def test_types_are_checked_alike_everywhere() -> None:
    mypy = CONFIG["tool"]["mypy"]
    assert mypy["strict"] is True
    assert not {"overrides", "exclude", "ignore_errors", "ignore_missing_imports"} & set(mypy)


def test_no_source_file_silences_a_checker_as_a_whole() -> None:
    silenced = [_short(path) for path in MODULES if SILENCED_FILE.search(_text(path))]
    assert silenced == []


def test_every_port_is_what_somebody_asks_for() -> None:
    ports = {
        name for path in MODULES if "ports/" in _short(path) for name in protocols(_tree(path))
    }
    users = [path for path in MODULES if _short(path).startswith(PORT_USERS)]
    asked_for = {name for path in users for name in annotated_names(_tree(path))}
    assert ports, "no Protocol found below src/semantic/ports: this guard looks in the wrong place"
    assert ports - asked_for == set()


def test_every_module_opens_with_what_it_is() -> None:
    assert [_short(path) for path in MODULES if not ast.get_docstring(_tree(path))] == []


def test_only_the_command_line_and_one_place_in_the_core_may_catch_everything() -> None:
    found = {_short(path): broad_handlers(_tree(path)) for path in MODULES}
    broad = {name: len(lines) for name, lines in found.items() if lines}
    inside = {name: n for name, n in broad.items() if not name.startswith("cli/")}
    assert inside == {"application/fair_threads.py": 1}


@pytest.mark.process
def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): foreign_addresses(_text(path)) for path in _kept_files()
    }
    assert "pyproject.toml" in found
    assert {name: addresses for name, addresses in found.items() if addresses} == {}


def test_folders_stay_small() -> None:
    assert crowded([_short(path) for path in MODULES]) == {}


def test_no_two_modules_have_one_name() -> None:
    assert namesakes([_short(path) for path in MODULES]) == {}


# --- the rules can fire -----------------------------------------------------------------------


@pytest.mark.parametrize("bases", ["Protocol", "Protocol[T]", "typing.Protocol", "Sized, Protocol"])
def test_a_protocol_is_recognised(bases: str) -> None:
    assert protocols(ast.parse(f"class Store({bases}): ...")) == {"Store"}


def test_an_implementation_is_no_protocol() -> None:
    assert protocols(ast.parse("class Disk(Store): ...")) == set()


@pytest.mark.parametrize(
    "code",
    [
        "def f(store: Store) -> None: ...",
        "def f(*, store: Store[T] | None = None) -> None: ...",
        "async def f() -> list[Store]: ...",
        "class Engine:\n    store: ports.Store",
        "def f(store: 'Store[T]') -> None: ...",
    ],
)
def test_a_use_as_annotation_is_recognised(code: str) -> None:
    assert "Store" in annotated_names(ast.parse(code))


@pytest.mark.parametrize("code", ["from ports import Store", "x = Store()", "# Store"])
def test_an_import_or_a_mention_is_no_use(code: str) -> None:
    assert "Store" not in annotated_names(ast.parse(code))


@pytest.mark.parametrize("caught", ["", " Exception", " BaseException", " (OSError, Exception)"])
def test_a_broad_handler_is_recognised(caught: str) -> None:
    assert broad_handlers(ast.parse(f"try:\n    x()\nexcept{caught}:\n    pass")) == [3]


def test_a_precise_handler_passes() -> None:
    assert broad_handlers(ast.parse("try:\n    x()\nexcept (OSError, KeyError):\n    pass")) == []


@pytest.mark.parametrize("folder", ["work", "tmp", "farm", "home/someone", "Users/someone"])
def test_a_machine_path_is_recognised(folder: str) -> None:
    assert foreign_addresses(f"see /{folder}/model") == [f"/{folder}"]


def test_a_registry_is_recognised() -> None:
    assert foreign_addresses(f"--index-url https://{REGISTRIES[0]}/simple") == [REGISTRIES[0]]


@pytest.mark.parametrize("text", ["team/work/notes", "rest/tmpfile", "$HOME/work", "./tmp/x"])
def test_a_relative_path_passes(text: str) -> None:
    assert foreign_addresses(text) == []


@pytest.mark.parametrize("line", ["# ruff: noqa", "# mypy: ignore-errors", "# type: ignore"])
def test_a_silenced_file_is_recognised(line: str) -> None:
    assert SILENCED_FILE.search(f'"""Doc."""\n{line}\n')


def test_a_crowded_folder_is_recognised() -> None:
    assert crowded([f"a/m{i}.py" for i in range(20)]) == {}
    assert crowded([f"a/m{i}.py" for i in range(21)]) == {"a": 21}


def test_namesakes_are_recognised() -> None:
    wires = ["semantic_server/http/anthropic/request.py", "semantic_server/http/openai/chat.py"]
    assert namesakes(wires) == {}
    others = ["adapters/mlx/request.py", "application/request.py"]
    assert namesakes(others) == {"request.py": others}
