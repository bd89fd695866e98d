"""The hub's description of a model before its download."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import cast

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub import constants as hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from semantic.domain.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    OperatorError,
    SemanticError,
)

_CONFIG = "config.json"
_GIT_HASH, _SHA256 = re.compile("[0-9a-f]{40}"), re.compile("[0-9a-f]{64}")
_NO_HASH = "0" * 64

_logger = logging.getLogger("huggingface_hub")

# The base class of the errors of the library's HTTP client: httpx or httpx2, depending on the
# library's version.
_HTTP_ERROR = cast("type[Exception]", HfHubHTTPError.__bases__[0])


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model. Only large files have a `sha256`."""

    path: str
    n_bytes: int
    blob_id: str
    sha256: str | None

    @property
    def name_in_cache(self) -> str:
        """The file's name in the cache."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model on the hub at `commit`, and the files to load."""

    hub_id: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)

    @property
    def weights_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files if file.path.endswith(".safetensors"))


def look_up(hub_id: str, patterns: Sequence[str]) -> RemoteModel:
    """Return the description of a model, with the files that match `patterns`. Raises
    InvalidRequestError, ModelNotFoundError, or OperatorError if the hub is unreachable."""
    api = HfApi()
    with hub_errors(hub_id):
        commit = api.model_info(hub_id).sha
        if commit is None or not _GIT_HASH.fullmatch(commit):
            raise OperatorError(f"the hub at {hub.ENDPOINT} sent no commit of {hub_id!r}")
        tree = api.list_repo_tree(hub_id, recursive=True, revision=commit)
        files = {entry.path: _file(entry) for entry in tree if isinstance(entry, RepoFile)}
    wanted = [path for path in sorted(files) if any(fnmatchcase(path, one) for one in patterns)]
    return RemoteModel(hub_id, commit, tuple(files[path] for path in wanted))


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that the hub found, with its downloads of a month and the date of its last change."""

    hub_id: str
    downloads: int
    changed: str


def search_models(words: str, limit: int) -> list[FoundModel]:
    """Return models for MLX with `words` in their names, the most downloaded first. Raises
    OperatorError if the hub is unreachable."""
    with hub_errors(words):
        found = HfApi().list_models(search=words, filter="mlx", sort="downloads", limit=limit)
        return [_found(one) for one in found]


def _found(model: ModelInfo) -> FoundModel:
    changed = model.last_modified or model.created_at
    return FoundModel(model.id, model.downloads or 0, f"{changed:%Y-%m-%d}" if changed else "-")


@contextmanager
def remote_config(model: RemoteModel) -> Iterator[Path]:
    """Yield a temporary folder with the model's configuration. Raises the errors of `look_up`."""
    with tempfile.TemporaryDirectory(prefix="semantic-") as folder:
        with hub_errors(model.hub_id), disable_progress_bars():
            path = hf_hub_download(model.hub_id, _CONFIG, revision=model.commit, cache_dir=folder)
        yield Path(path).parent


@contextmanager
def hub_errors(hub_id: str) -> Iterator[None]:
    """Turn huggingface_hub's errors about `hub_id` into errors of this package."""
    level = _logger.level
    _logger.setLevel(logging.ERROR)
    try:
        yield
    except SemanticError:
        raise
    except HFValidationError as error:
        raise InvalidRequestError(f"{hub_id!r} is not a hub id: expected org/name") from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"the hub shows {hub_id!r} only after you accept its terms: accept them on its page at "
            f"{hub.ENDPOINT}, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub at {hub.ENDPOINT} has no model {hub_id!r} (a private one needs "
            "`hf auth login`)"
        ) from error
    except RemoteEntryNotFoundError as error:
        raise ModelNotFoundError(f"{hub_id!r} has no {_CONFIG}: not a model folder") from error
    except OfflineModeIsEnabled as error:
        raise OperatorError("cannot fetch from the hub: HF_HUB_OFFLINE is set") from error
    except HfHubHTTPError as error:
        raise OperatorError(
            f"the hub at {hub.ENDPOINT} answered {error.response.status_code}"
        ) from error
    except (_HTTP_ERROR, LocalEntryNotFoundError) as error:
        reason = _said(error.__cause__ or error)
        raise OperatorError(f"no connection to the hub at {hub.ENDPOINT}: {reason}") from error
    except OSError as error:
        raise OperatorError(f"cannot fetch {hub_id!r}: {_said(error)}") from error
    finally:
        _logger.setLevel(level)


def _file(entry: RepoFile) -> RemoteFile:
    # Path and hashes become file names on this machine.
    sha256 = None if entry.lfs is None else entry.lfs.sha256
    parts = PurePosixPath(entry.path).parts
    are_hashes = _GIT_HASH.fullmatch(entry.blob_id) and _SHA256.fullmatch(sha256 or _NO_HASH)
    if not (are_hashes and parts and parts[0] != "/" and ".." not in parts):
        raise OperatorError(
            f"the hub at {hub.ENDPOINT} lists an invalid file {entry.path!r:.80}: expected a path "
            "inside the model's folder and hexadecimal hashes; use another hub"
        )
    return RemoteFile(entry.path, entry.size, entry.blob_id, sha256)


def _said(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
