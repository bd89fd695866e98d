"""A release is equal when it is built again, says one version, and finds the Pythons at hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.release import (
    ROOT,
    SBOM_TOOL,
    URLS,
    ReleaseError,
    bill_of_materials,
    checksums,
    pythons,
    require_equal,
    stamp,
    supported_pythons,
    version_of,
)

HOME = "https://example.org/somebody/semantic"
WORKFLOWS = ROOT / ".github" / "workflows"


def tree(folder: Path, *, listed: str = "## [1.2.3]\n\n## [1.2.2]\n") -> Path:
    """What the release reads of a commit."""
    package = folder / "src" / "semantic"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{listed}")
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "semantic-engine"\ndynamic = ["version"]\n\n[tool.ruff]\nsrc = ["."]\n'
    )
    (folder / "requirements.txt").write_text("numpy==2.4.6\nxxhash==3.5.0\n")
    (folder / "README.md").write_text(
        "[a](docs/a.md) [b](https://example.com/b) [c](#part) [d](docs/a.md#part)\n"
    )
    return folder


def interpreter(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_address_is_in_the_metadata_and_in_the_links(tmp_path: Path) -> None:
    stamp(tree(tmp_path), HOME, "v1.2.3")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    urls = project["project"]["urls"]
    assert list(urls) == list(URLS)
    assert urls["Changelog"] == f"{HOME}/blob/v1.2.3/CHANGELOG.md"
    assert project["tool"]["ruff"] == {"src": ["."]}
    below = f"{HOME}/blob/v1.2.3/docs/a.md"
    assert (tmp_path / "README.md").read_text() == (
        f"[a]({below}) [b](https://example.com/b) [c](#part) [d]({below}#part)\n"
    )


def test_the_files_behind_the_addresses_exist() -> None:
    paths = [path.partition("{tag}/")[2] for path in URLS.values() if "/blob/" in path]
    assert len(paths) > 1
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_a_version_that_differs_somewhere_is_refused(tmp_path: Path) -> None:
    assert version_of(tree(tmp_path / "a"), "v1.2.3") == "1.2.3"
    with pytest.raises(ReleaseError, match=r"'the tag': '1\.2\.4'"):
        version_of(tmp_path / "a", "v1.2.4")
    with pytest.raises(ReleaseError, match=r"one version everywhere.*'CHANGELOG\.md': '1\.2\.2'"):
        version_of(tree(tmp_path / "b", listed="## [1.2.2]\n"), None)


def test_a_release_has_no_unreleased_changes(tmp_path: Path) -> None:
    assert version_of(tree(tmp_path, listed="## [Unreleased]\n\n## [1.2.3]\n"), None) == "1.2.3"
    with pytest.raises(ReleaseError, match=r"'CHANGELOG\.md': 'Unreleased'"):
        version_of(tmp_path, "v1.2.3")


def test_the_package_says_one_version_in_one_place() -> None:
    """Besides the changelog. The formula has it of the sdist's name, the image of the tag."""
    version = version_of(ROOT, None)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    source = project["tool"]["hatch"]["version"]["path"]
    places = ["src", "docs", "deploy", "tools", ".github", "README.md", "pyproject.toml"]
    wanted = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.])")
    files = [file for place in places for file in (ROOT / place, *(ROOT / place).rglob("*"))]
    texts = [one for one in files if one.suffix in {".md", ".py", ".rb", ".toml", ".yml", ""}]
    found = [one for one in texts if one.is_file() and wanted.search(one.read_text("utf-8"))]
    assert [file.relative_to(ROOT).as_posix() for file in found] == [source]


@pytest.mark.process
def test_the_bill_of_materials_has_the_locked_requirements(tmp_path: Path) -> None:
    tool = [sys.executable, "-m", "uv", "tool", "run", "--from", SBOM_TOOL, "cyclonedx-py", "-h"]
    if subprocess.run(tool, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a package index")
    written = bill_of_materials(tree(tmp_path / "tree"), tmp_path, "1.2.3")
    bill = json.loads(written.read_text(encoding="utf-8"))
    assert (written.name, bill["bomFormat"]) == ("semantic_engine-1.2.3.cdx.json", "CycloneDX")
    named = [bill["metadata"]["component"], *bill["components"]]
    assert [(one["name"], one["version"]) for one in named] == [
        ("semantic-engine", "1.2.3"),
        ("numpy", "2.4.6"),
        ("xxhash", "3.5.0"),
    ]


@pytest.mark.process
def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    shims, real = tmp_path / "shims", tmp_path / "real"
    interpreter(shims, "python3.12", "echo 'there is no such version'; exit 127")
    interpreter(shims, "python3.13", "echo 3.12.9")
    wanted = interpreter(real, "python3.12", "echo 3.12.1")
    interpreter(real, "python3.10", "echo 3.10.1")
    assert pythons([tmp_path / "none", shims, real], ["3.11", "3.12", "3.13"]) == {"3.12": wanted}


def test_checksums_are_what_sha256sum_reads(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "a").write_bytes(b"")
    lines = checksums([tmp_path / "b", tmp_path / "a"])
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert lines.splitlines()[0] == f"{empty}  a"


def test_two_builds_that_differ_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_bytes(b"one")
    second.write_bytes(b"one")
    require_equal(first, second)
    second.write_bytes(b"two")
    with pytest.raises(ReleaseError, match="differ"):
        require_equal(first, second)


def test_the_workflow_tests_every_version_that_the_package_names() -> None:
    text = (WORKFLOWS / "ci.yml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"python: \[(.+)\]", text)
    assert [one.strip(' "') for one in listed.split(",")] == supported_pythons(ROOT)
    assert "macos" in text
    assert "ubuntu" in text


def test_only_what_publishes_may_ask_for_an_identity() -> None:
    text = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    top, _, below = text.partition("jobs:\n")
    jobs = dict(
        part.split(":", 1) for part in re.split(r"^  (?=\w+:$)", below, flags=re.MULTILINE)[1:]
    )
    granted = {
        name: set(re.findall(r"^      ([\w-]+): write$", job, re.MULTILINE))
        for name, job in jobs.items()
    }
    proof = {"id-token", "attestations"}
    assert granted == {
        "build": set(),
        "publish": proof,
        "image": {*proof, "packages"},
        "files": {"contents"},
    }
    assert "write" not in top
    assert "secrets." not in text, "each job has a token of its own, and the index needs none"
    assert "          attestations: true\n" in jobs["publish"]
    attested = {name for name, job in jobs.items() if "actions/attest-build-provenance@" in job}
    assert attested == {"publish", "image"}
    assert "subject-digest: ${{ steps.pushed.outputs.digest }}" in jobs["image"]
    assert "needs: build\n" in jobs["publish"]
    assert "needs: build\n" in jobs["image"]
    assert "run: make release" in jobs["build"]


def test_the_workflows_use_one_version_of_each_action() -> None:
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS.glob("*.yml")]
    used = {one for text in texts for one in re.findall(r"uses: (\S+)@(\S+)", text)}
    assert len(used) == len({name for name, _ in used})


@pytest.mark.process
def test_every_target_that_a_workflow_makes_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS.glob("*.yml")]
    made = {target for text in texts for target in re.findall(r"\bmake ([a-z-]+)", text)}
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made - {line.split()[0] for line in listed.stdout.splitlines()} == set()
