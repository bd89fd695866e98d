"""What the documents name exists: modules, functions and classes in them, and linked files.

A path in a code span is looked for from the repository's root and from `src/semantic`; a span
`path.py::Name.method` names a definition in that module. Nothing of `semantic` is imported.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.site import navigation, pages

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "semantic"
FOLDERS = ("src", "tests", "docs", "benchmarks", "examples", "experiments", "tools")
MODULES = sorted((ROOT / "src").rglob("*.py"))
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "experiments").rglob("*.md"),
    ]
)
FOREIGN = frozenset({"BPEStreamingDetokenizer", "SPMStreamingDetokenizer"})
"""Names of mlx-lm that are written in documents only."""
MOST_WORDS = {"README.md": 900, "ARCHITECTURE.md": 1200}

FENCE = re.compile(r"^(```+|~~~+).*?^\1", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
MODULE = re.compile(r"(?P<path>(?:[\w.-]+/)*[\w-]+\.py)(?:::(?P<name>[\w.]+))?")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
CAMEL = re.compile(r"[A-Z]+[a-z0-9]+[A-Z]\w*")
ROW = re.compile(r"\| ([^|]+) \| .+ \| `([^`]+)` \|")
FOLDER = re.compile(r"(?:[\w.-]+/)+[\w.-]*")
THREAD = re.compile(
    r"""thread_name_prefix="(?P<pool>[^"]+)"|(?:Thread\(|__init__\()[^)]*\bname="(?P<one>[^"]+)\""""
)
MAKE = re.compile(r"(?:`|^    )make ([a-z-]+)", re.MULTILINE)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)

# --- what each rule looks for -----------------------------------------------------------------


def unknown_names(text: str) -> list[str]:
    """Paths and definitions in the code spans of a text that are not there."""
    spans = SPAN.findall(FENCE.sub("", text))
    return [span for span in spans if not _is_known(span)]


def broken_links(text: str, folder: Path) -> list[str]:
    """Links to files that are not there; addresses of other sites are not looked at."""
    return [target for target in LINK.findall(text) if not (folder / target).exists()]


def broken_anchors(text: str, path: Path) -> list[str]:
    """Links of the document at `path` to headings that are not there."""
    return [
        f"{target}#{anchor}"
        for target, anchor in ANCHOR.findall(FENCE.sub("", text))
        if anchor not in _anchors(text if not target else _text_at(path.parent / target))
    ]


def _anchors(text: str) -> set[str]:
    """Anchors that mean the same heading on the site and where repositories are shown.

    Both leave out punctuation; of two hyphens in a row the site leaves one.
    """
    titles = (re.sub(r"[^\w\s-]", "", title) for title in HEADING.findall(FENCE.sub("", text)))
    slugs = (title.strip().lower().replace(" ", "-") for title in titles)
    return {slug for slug in slugs if "--" not in slug}


def _text_at(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def thread_names(source: str) -> set[str]:
    """Names that a module gives to threads and pools of threads."""
    return {match["pool"] or match["one"] for match in THREAD.finditer(source)}


def defined_names(tree: ast.Module) -> set[str]:
    """Classes, functions, methods (`Class.method`) and assigned names of a module."""
    return set(_definitions(tree.body, ""))


def _is_known(span: str) -> bool:
    module = MODULE.fullmatch(span)
    if module is not None:
        places = _places(module["path"])
        name = module["name"]
        return bool(places) and (name is None or any(name in _names(path) for path in places))
    if IDENTIFIER.fullmatch(span):
        return all(name in _words() for name in span.split(".") if CAMEL.fullmatch(name))
    if FOLDER.fullmatch(span) and span.split("/", 1)[0] in _top_folders():
        return bool(_places(span))
    return True


def _places(path: str) -> list[Path]:
    if "/" in path:
        return [found for base in (ROOT, ROOT / "src", SOURCE) if (found := base / path).exists()]
    below = (found for folder in FOLDERS for found in (ROOT / folder).rglob(path))
    return [found for found in below if "node_modules" not in found.parts]


def _top_folders() -> set[str]:
    inner = (path for base in (SOURCE, SOURCE.parent) for path in base.iterdir() if path.is_dir())
    return {*FOLDERS, *(path.name for path in inner)}


@cache
def _words() -> frozenset[str]:
    """Every identifier in the repository's Python files but this one."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = (path.read_text(encoding="utf-8") for path in files if path != Path(__file__))
    return FOREIGN.union(word for text in texts for word in re.findall(r"\w+", text))


def unsearchable_terms(glossary: str) -> list[str]:
    """Terms of a glossary that a search does not find in the module that defines them."""
    rows = [match for match in map(ROW.fullmatch, glossary.splitlines()) if match is not None]
    return [
        f"{term}: {place}"
        for terms, place in (row.groups() for row in rows)
        for term in terms.split(", ")
        if _plain(term) not in _plain(_text_of(place.partition("::")[0]) + place)
    ]


def _text_of(path: str) -> str:
    files = [
        file
        for found in _places(path)
        for file in (sorted(found.rglob("*.py")) if found.is_dir() else [found])
    ]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _plain(text: str) -> str:
    """Lower case, in words: a term is the same as a name of a class or a function."""
    return re.sub(r"[\s_-]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower()


def _names(path: Path) -> set[str]:
    return defined_names(ast.parse(path.read_text(encoding="utf-8")))


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef(name=name, body=inner):
                yield prefix + name
                yield from _definitions(inner, f"{prefix}{name}.")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield prefix + name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
            case _:
                pass


def _short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- the rules --------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=_short)
def test_every_module_and_definition_that_a_document_names_exists(document: Path) -> None:
    assert unknown_names(document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_short)
def test_every_file_that_a_document_links_exists(document: Path) -> None:
    assert broken_links(document.read_text(encoding="utf-8"), document.parent) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_short)
def test_every_heading_that_a_document_links_exists(document: Path) -> None:
    assert broken_anchors(document.read_text(encoding="utf-8"), document) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=_short)
def test_every_make_target_that_a_document_names_exists(document: Path) -> None:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    assert set(MAKE.findall(document.read_text(encoding="utf-8"))) - targets == set()


def test_every_page_is_in_the_navigation_once() -> None:
    listed = Counter(navigation())
    assert set(listed) == {page.as_posix() for page in pages()}
    assert max(listed.values()) == 1


@pytest.mark.parametrize(("name", "most"), MOST_WORDS.items())
def test_a_document_to_begin_with_is_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").split()) <= most


def test_every_term_of_the_glossary_is_found_where_it_is_defined() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert len(ROW.findall(glossary)) > 1
    assert unsearchable_terms(glossary) == []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in folder.glob("0*.md") if f"({path.name})" not in index] == []


def test_the_architecture_names_every_thread() -> None:
    named = {name for path in MODULES for name in thread_names(path.read_text(encoding="utf-8"))}
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(named) > 1
    assert {name for name in named if f"`{name}`" not in text} == set()


# --- the rules can fire -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "span",
    [
        "domain/no_such_module.py",
        "no_such_module.py",
        "domain/services.py::NoSuchClass",
        "domain/services.py::BlockPool.no_such_method",
        "adapters/no_such_folder",
        "src/semantic/no_such_folder/",
        "NoSuch" + "Class",
        "BlockPool.NoSuch" + "Method",
    ],
)
def test_an_unknown_name_is_found(span: str) -> None:
    assert unknown_names(f"see `{span}`") == [span]


@pytest.mark.parametrize(
    "span",
    [
        "domain/services.py",
        "services.py",
        "domain/services.py::BlockPool.share",
        "src/semantic/domain",
        "adapters/stores/",
        "BlockPool.share",
        "path/or/hub-id",
        "X-Agent-ID",
    ],
)
def test_a_known_name_passes(span: str) -> None:
    assert unknown_names(f"see `{span}`") == []


def test_code_blocks_are_no_names() -> None:
    assert unknown_names("```\n`no_such_module.py`\n```\n") == []


def test_a_term_that_is_not_found_is_reported() -> None:
    row = "| {} | Counts blocks. | `domain/services.py::BlockPool` |"
    assert unsearchable_terms(row.format("block pool")) == []
    assert unsearchable_terms(row.format("block heap")) == [
        "block heap: domain/services.py::BlockPool"
    ]


def test_a_broken_link_is_found() -> None:
    assert broken_links("[a](no_such.md) [b](https://example.org)", ROOT) == ["no_such.md"]


def test_a_broken_anchor_is_found() -> None:
    text = (
        "# The store's folder\n\n```\n# no heading\n```\n[a](#the-stores-folder) [b](#no-heading)"
    )
    assert broken_anchors(text, ROOT / "README.md") == ["#no-heading"]
    assert broken_anchors("[a](README.md#limits) [b](README.md#no)", ROOT / "a.md") == [
        "README.md#no"
    ]


@pytest.mark.parametrize(
    "source",
    [
        'ThreadPoolExecutor(4, thread_name_prefix="load")',
        'threading.Thread(target=run, name="load", daemon=True)',
        'super().__init__(name="load", daemon=True)',
    ],
)
def test_a_thread_is_recognised(source: str) -> None:
    assert thread_names(source) == {"load"}
