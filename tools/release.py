"""Builds what is released of the checked out commit, and tries it as a new user would.

    python -m tools.release [--home URL] [--tag vX.Y.Z] [--out dist]

The sdist is built twice, the wheel from the tree and from the sdist: they must be equal byte by
byte. The wheel is installed into an empty environment of each supported Python at hand, with the
newest versions of what it needs, and `semantic demo` runs there, from an empty folder. Only then
are the files, a bill of materials and checksums moved to `--out`. `--home` is the repository's
address: the package's addresses and the links of its README are made of it. Uploads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
CHECKSUMS: Final = "SHA256SUMS"
URLS: Final = {
    "Homepage": "",
    "Documentation": "/blob/{tag}/docs/server.md",
    "Changelog": "/blob/{tag}/CHANGELOG.md",
    "Source": "/tree/{tag}",
    "Issues": "/issues",
}
"""The package's addresses, below that of the repository."""
_LINK: Final = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")
_CONSTRAINTS: Final = "requirements-build.txt"
_UNRELEASED: Final = "Unreleased"
SBOM_TOOL: Final = "cyclonedx-bom==7.5.0"


class ReleaseError(Exception):
    """What is released would not be right; the message is for the person who releases."""


@dataclass(frozen=True, slots=True)
class Tried:
    """An installation in an empty environment: seconds from nothing, and of each part."""

    python: str
    install: float
    first_answer: float
    demo: float


def stamp(tree: Path, home: str, tag: str) -> None:
    """Write the repository's address into the metadata and the README of an exported tree."""
    project = tree / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    lines = [f'{name} = "{home}{path.format(tag=tag)}"' for name, path in URLS.items()]
    project.write_text(f"{text}\n[project.urls]\n" + "\n".join(lines) + "\n", encoding="utf-8")
    readme = tree / "README.md"
    readme.write_text(
        _LINK.sub(rf"]({home}/blob/{tag}/\1)", readme.read_text(encoding="utf-8")), encoding="utf-8"
    )


def version_of(tree: Path, tag: str | None) -> str:
    """The version in all places that say it, with a tag also at the top of the changelog. Raises
    ReleaseError where they differ."""
    code = (tree / "src" / "semantic" / "__init__.py").read_text(encoding="utf-8")
    changes = (tree / "CHANGELOG.md").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', code, re.MULTILINE)
    listed = re.findall(r"^## \[(.+)\]", changes, re.MULTILINE)
    newest = next(one for one in [*listed, "none"] if tag is not None or one != _UNRELEASED)
    said = {"semantic.__version__": version, "CHANGELOG.md": newest}
    if tag is not None:
        said["the tag"] = tag.removeprefix("v")
    if len(set(said.values())) > 1:
        raise ReleaseError(f"expected one version everywhere, got {said}")
    return str(version)


def pythons(folders: Iterable[Path], supported: Sequence[str]) -> dict[str, Path]:
    """The first interpreter of each supported version ("3.11") that runs, by version."""
    found: dict[str, Path] = {}
    for folder in folders:
        for version in supported:
            python = folder / f"python{version}"
            if version not in found and python.is_file() and _runs(python, version):
                found[version] = python
    return dict(sorted(found.items()))


def supported_pythons(tree: Path) -> list[str]:
    """The versions of Python that the package's classifiers name."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = (one.rpartition(" :: ")[2] for one in project["classifiers"] if ":: Python ::" in one)
    return [version for version in named if re.fullmatch(r"3\.\d+", version)]


def checksums(files: Iterable[Path]) -> str:
    """Lines as `sha256sum --check` reads them, by name."""
    return "".join(f"{digest(file)}  {file.name}\n" for file in sorted(files))


def digest(file: Path) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def require_equal(first: Path, second: Path) -> None:
    """Raises ReleaseError unless both builds of a file are equal."""
    if digest(first) != digest(second):
        raise ReleaseError(f"two builds of {first.name} differ: {first} and {second}")


def requirement(wheel: Path) -> str:
    """The wheel, with what computes on this platform."""
    return f"{wheel}[cpu]" if sys.platform == "linux" else str(wheel)


def build(tree: Path, work: Path, epoch: int) -> list[Path]:
    """The sdist and the wheel of `tree`, each built twice. Raises ReleaseError if they differ."""
    again = work / "again"
    shutil.copytree(tree, again)
    built = [
        _build(source, kind, work / folder, tree, epoch)
        for source, kind, folder in [(tree, "--sdist", "1"), (again, "--sdist", "2")]
    ]
    require_equal(*built)
    wheels = [
        _build(source, "--wheel", work / folder, tree, epoch)
        for source, folder in [(tree, "3"), (built[0], "4")]
    ]
    require_equal(*wheels)
    return [built[0], wheels[0]]


def try_wheel(wheel: Path, python: Path, work: Path) -> Tried:
    """Install and run the demonstration in an environment that has nothing else."""
    environment, empty = work / "environment", work / "empty"
    empty.mkdir(parents=True)
    clean = {"PATH": os.defpath, "HOME": str(empty), "LANG": "C.UTF-8"}
    began = time.monotonic()
    _uv("venv", "--quiet", "--python", str(python), str(environment))
    _uv("pip", "install", "--quiet", "--python", str(environment), requirement(wheel))
    installed = time.monotonic()
    program = str(environment / "bin" / "semantic")
    _call([program, "run", "--max-tokens", "16", "Hello!"], cwd=empty, env=clean)
    answered = time.monotonic()
    _call([program, "demo"], cwd=empty, env=clean)
    return Tried(
        _version(python), installed - began, answered - installed, time.monotonic() - answered
    )


def main() -> None:
    """Build, try, and move what is right to the folder that was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--home", help="the repository's address (https://...)")
    parser.add_argument("--tag", help="the version's tag; else v and the version")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as work:
            release(Path(work), given.home, given.tag, given.out)
    except ReleaseError as error:
        sys.exit(f"error: {error}")


def release(work: Path, home: str | None, tag: str | None, out: Path) -> None:
    """Everything, in the folder `work`; `out` has either all files or is as it was."""
    tree = work / "tree"
    epoch = _export(tree)
    version = version_of(tree, tag)
    if home is None:
        print("Without --home the package has no addresses and its README no links.")
    else:
        stamp(tree, home.rstrip("/"), tag or f"v{version}")
    files = build(tree, work, epoch)
    for file in files:
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, two builds are equal")
    at_hand = pythons(_folders(os.environ), supported_pythons(tree))
    if not at_hand:
        raise ReleaseError(f"expected one of Python {', '.join(supported_pythons(tree))} at hand")
    for name, python in at_hand.items():
        tried = try_wheel(files[1], python, work / name)
        print(
            f"Python {tried.python}: installed in {tried.install:.1f} s, first answer of the "
            f"program {tried.first_answer:.1f} s later; the demonstration took {tried.demo:.1f} s"
        )
    files += [bill_of_materials(tree, work, version), *formula(tree, work, files[0], home, version)]
    _move(files, out)


def formula(tree: Path, work: Path, sdist: Path, home: str | None, version: str) -> list[Path]:
    """The Homebrew formula for this sdist; none without the address that it is loaded from."""
    template = tree / "deploy" / "homebrew" / "semantic-engine.rb"
    if home is None or not template.exists():
        return []
    text = template.read_text(encoding="utf-8")
    values = {"HOME": home, "URL": f"{home}/releases/download/v{version}/{sdist.name}"}
    for name, value in {**values, "SHA256": digest(sdist)}.items():
        text = text.replace(f"@{name}@", value)
    written = work / template.name
    written.write_text(text, encoding="utf-8")
    return [written]


def bill_of_materials(tree: Path, work: Path, version: str) -> Path:
    """The locked requirements in CycloneDX's JSON, as components of this version."""
    written = work / f"semantic_engine-{version}.cdx.json"
    _uv(
        *("tool", "run", "--quiet", "--from", SBOM_TOOL, "cyclonedx-py", "requirements"),
        *("--output-reproducible", "--pyproject", str(tree / "pyproject.toml")),
        *("--output-file", str(written), str(tree / "requirements.txt")),
    )
    bill = json.loads(written.read_text(encoding="utf-8"))
    bill["metadata"]["component"]["version"] = version  # which pyproject.toml does not say
    written.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    return written


def _move(files: Sequence[Path], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, out / file.name)
    (out / CHECKSUMS).write_text(checksums(out / file.name for file in files), encoding="utf-8")
    print(f"{out}: {', '.join(file.name for file in files)}, {CHECKSUMS}")


def _export(tree: Path) -> int:
    """The checked out commit as files; returns its time. Raises ReleaseError for changes."""
    if _git("status", "--porcelain", "--untracked-files=no"):
        raise ReleaseError("expected a tree without changes: commit them first")
    tree.mkdir()
    archive = tree.parent / "tree.tar"
    _git("archive", "--output", str(archive), "HEAD")
    shutil.unpack_archive(archive, tree, filter="data")
    return int(_git("log", "-1", "--format=%ct"))


def _build(source: Path, kind: str, out: Path, tree: Path, epoch: int) -> Path:
    constraints = str(tree / _CONSTRAINTS)
    _uv(
        *("build", "--quiet", kind, "--build-constraints", constraints),
        *("--out-dir", str(out), str(source)),
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
    )
    (built,) = (path for path in out.iterdir() if path.suffix in {".whl", ".gz"})
    return built


def _folders(environ: Mapping[str, str]) -> list[Path]:
    """Where interpreters may be: the path, and pyenv's, whose commands are not on it."""
    pyenv = Path(environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    path = environ.get("PATH", os.defpath).split(os.pathsep)
    return [*map(Path, path), *sorted(pyenv.glob("*/bin"))]


def _runs(python: Path, version: str) -> bool:
    """Whether it is an interpreter: a command of pyenv may only say that there is none."""
    try:
        return _version(python).startswith(f"{version}.")
    except ReleaseError:
        return False


def _version(python: Path) -> str:
    return _call([str(python), "-c", "import platform; print(platform.python_version())"])


def _git(*arguments: str) -> str:
    return _call(["git", *arguments], cwd=ROOT)


def _uv(*arguments: str, env: Mapping[str, str] | None = None) -> None:
    _call([sys.executable, "-m", "uv", *arguments], env=env)


def _call(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
