"""The hub's cache on disk: lists and removes models. Never uses the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import (
    CachedRepoInfo,
    CachedRevisionInfo,
    HFCacheInfo,
    get_cached_repo_tree,
    scan_cache_dir,
    snapshot_download,
)
from huggingface_hub import constants as hub
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    CacheNotFound,
    HFValidationError,
    LocalEntryNotFoundError,
)

from semantic.domain.errors import ModelNotFoundError, OperatorError

_MAIN = "main"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A cached model. `n_bytes` counts all its revisions; `used_at` is in Unix time."""

    hub_id: str
    folder: Path
    commit: str
    n_bytes: int
    unfinished_bytes: int
    used_at: float


def cached_models() -> tuple[CachedModel, ...]:
    """Return the cached models, sorted by name. Raises OperatorError if the cache is unreadable."""
    cache = _scan()
    found = [_model(repo, cache) for repo in _models(cache)]
    return tuple(sorted(found, key=lambda model: model.hub_id.lower()))


def cached_ids() -> Sequence[str]:
    """Return the hub ids in the cache."""
    prefix = "models--"
    folders = Path(hub.HF_HUB_CACHE).glob(f"{prefix}*")
    return sorted(folder.name.removeprefix(prefix).replace("--", "/") for folder in folders)


def complete_folder(hub_id: str, patterns: Sequence[str]) -> Path | None:
    """Return the folder from which `hub_id` loads without the network. None if a file that matches
    `patterns` is missing."""
    try:
        found = snapshot_download(hub_id, allow_patterns=list(patterns), local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(found)


def listed_sizes(model: CachedModel, patterns: Sequence[str]) -> dict[str, int] | None:
    """Return the sizes in bytes, by path, of the files that match `patterns`. None if the hub's
    list is unknown."""
    try:
        tree = get_cached_repo_tree(model.hub_id, revision=model.commit)
    except CachedRepoTreeNotFoundError:
        return None
    sizes = {entry.path: entry.size for entry in tree}
    return {
        path: size
        for path, size in sizes.items()
        if any(fnmatchcase(path, pattern) for pattern in patterns)
    }


def remove_cached(hub_id: str, *, dry_run: bool = False) -> int:
    """Delete a model; return the bytes that this frees. If `dry_run`, delete nothing. Raises
    ModelNotFoundError."""
    cache = _scan()
    repo = next((repo for repo in _models(cache) if repo.repo_id == hub_id), None)
    if repo is None:
        raise ModelNotFoundError(f"{hub_id!r} is not in the hub's cache")
    unfinished = _unfinished(repo, cache)
    # Copies of a model on the hub can have the same commits: the deletion plan must not include
    # them.
    own = replace(cache, repos=frozenset([repo]))
    plan = own.delete_revisions(*(revision.commit_hash for revision in repo.revisions))
    if not dry_run:
        plan.execute()
        if repo.repo_path.exists():
            raise OperatorError(f"cannot delete all of {repo.repo_path}: check its permissions")
    return plan.expected_freed_size + unfinished


def _scan() -> HFCacheInfo:
    try:
        return scan_cache_dir(hub.HF_HUB_CACHE)
    except CacheNotFound:
        return HFCacheInfo(0, frozenset(), frozenset(), [])
    except (OSError, ValueError) as error:
        raise OperatorError(f"cannot read the hub's cache {hub.HF_HUB_CACHE}: {error}") from error


def _models(cache: HFCacheInfo) -> list[CachedRepoInfo]:
    return [repo for repo in cache.repos if repo.repo_type == "model" and repo.revisions]


def _model(repo: CachedRepoInfo, cache: HFCacheInfo) -> CachedModel:
    revision = _current(repo)
    return CachedModel(
        repo.repo_id,
        revision.snapshot_path,
        revision.commit_hash,
        repo.size_on_disk,
        _unfinished(repo, cache),
        repo.last_accessed,
    )


def _current(repo: CachedRepoInfo) -> CachedRevisionInfo:
    """Return the main branch's revision; without a main branch, the revision written last."""
    newest = max(repo.revisions, key=lambda revision: revision.last_modified)
    return repo.refs.get(_MAIN, newest)


def _unfinished(repo: CachedRepoInfo, cache: HFCacheInfo) -> int:
    inside = [one for one in cache.incomplete_files if repo.repo_path in one.file_path.parents]
    return sum(one.size_on_disk for one in inside)
