"""Access to an object store with deadlines and a circuit breaker. The URL selects S3, GCS, Azure, a
folder or memory. Credentials come from the environment."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
)
from obstore.store import S3Store, from_url

from semantic.adapters.stores.write_queue import FAILURES, Backoff
from semantic.domain.errors import InvalidRequestError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig
    from typing_extensions import Buffer

SCHEMES = ("s3", "gs", "az", "file", "memory")
DEADLINE = 2.0
"""Seconds for a small request."""
BODY_DEADLINE = 10.0
"""Seconds for an upload, or for reading `READ_BYTES`."""
PAGE = 1000
"""The number of objects in a page of a listing, and in a deletion: S3's limits."""
_LATE = 0.75 * DEADLINE
"""Seconds after which a call marked as urgent counts as late."""
_CONNECT = timedelta(seconds=1)
_MOST_BYTES = 64 << 20  # most bytes of a small object: a manifest has a few per token
_MOST_CHARACTERS = 300
_REPORT_SECONDS = 60.0
"""Seconds between two reports about an object store that keeps failing."""
_REQUEST = re.compile(r"Error performing (\w+) ([^\s?]+)\S* in \S+ - (?:Server returned .*code: )?")
_ANSWER = re.compile(r"<Code>([^<]+)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_NO_BUCKET = "<Code>NoSuchBucket<"
_CAUSE = re.compile(r'(?:error|message): "([^"\n]+)"|Invalid\w+\(\s*(\w+)|(TimedOut)')
"""Finds the cause in an error's text if the first line does not name it."""
_NOT_LISTED = "cannot list the object store, so other replicas' objects stay unknown"
_NOT_DELETED = "cannot delete from the object store, so deleted objects stay there"
_CERTIFICATES = {
    "UnknownIssuer": "its certificate is from an unknown CA, SSL_CERT_FILE can name more",
    "NotValidForNameContext": "its certificate is for another name",
    "ExpiredContext": "its certificate has expired",
    "NotValidYetContext": "its certificate is not valid yet, by this machine's clock",
}
"""Messages for a refused server certificate."""
_NO_CREDENTIALS = {
    "://169.254.169.254/latest/": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "://169.254.169.254/metadata/": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "://metadata": "GOOGLE_APPLICATION_CREDENTIALS",
}
"""URLs that need credentials. Each has the names of the environment variables to set."""
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3")


class UnavailableError(Exception):
    """The object store failed, was too slow, or had failed shortly before."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing. `written` is the time on the store's clock."""

    path: str
    n_bytes: int
    written: datetime


class Objects:
    """The objects of an object store below one prefix. Thread-safe.

    Every call raises UnavailableError if the store fails, and at once while the circuit breaker is
    open. A missing object raises FileNotFoundError. A missing bucket is a failure.
    """

    def __init__(
        self,
        small: ObjectStore,
        large: ObjectStore | None = None,
        *,
        folder: SharedFolder | None = None,
        notify: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`large` is a connection with a longer deadline. `folder` is the shared folder, or None.
        `notify` receives a sentence about each failure and about its end."""
        self._small = small
        self._large = large or small
        self._folder = folder
        self._clock = clock
        self._backoff = Backoff(clock)
        self._urgent: dict[object, float] = {}  # start of each urgent call
        self._lock = threading.Lock()
        self._notify = notify or (lambda _: None)
        self._refused = 0
        fails = "the object store fails, so prefill replaces its blocks"
        self._fails = _Outage(fails, "the object store answers again", clock)
        full = "the object store accepts no writes"
        self._takes_nothing = _Outage(full, "the object store accepts writes again", clock)
        self._refuses = {
            "list": _Outage(_NOT_LISTED, "the object store lists again", clock),
            "delete": _Outage(_NOT_DELETED, "the object store deletes again", clock),
        }

    @classmethod
    def open(cls, url: str, notify: Callable[[str], None] | None = None) -> Objects:
        """Return the objects at `url`, without sending a request. Raises InvalidRequestError for an
        unknown kind of URL and for a missing folder."""
        folder = _folder_of(url)
        large = _connected(url, BODY_DEADLINE, signs_bodies=False)
        return cls(_connected(url, DEADLINE), large, folder=folder, notify=notify)

    @property
    def is_open(self) -> bool:
        """True if the circuit breaker is open. Calls then fail at once."""
        with self._lock:
            return self._backoff.is_on()

    @property
    def has_failed(self) -> bool:
        """True if the last calls failed or a call marked as `urgent` is late."""
        with self._lock:
            late = self._clock() - _LATE
            return self._backoff.has_begun or any(at <= late for at in self._urgent.values())

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Mark the calls in the `with` block as urgent, because an answer waits for them."""
        this = object()
        with self._lock:
            self._urgent[this] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._urgent[this]

    @property
    def breaks(self) -> int:
        """The number of times that the circuit breaker has opened."""
        return self._backoff.times

    def size(self, path: str) -> int | None:
        """Return the size of an object in bytes, or None."""
        with self._attempt():
            try:
                return obstore.head(self._small, path)["size"]
            except FileNotFoundError:
                return None

    def get(self, path: str) -> Buffer:
        """Return a small object. For a large object, return b"". Raises FileNotFoundError."""
        with self._attempt():
            found = obstore.get(self._small, path)
            return found.bytes() if found.meta["size"] <= _MOST_BYTES else b""

    def read(self, path: str, start: int, stop: int) -> Buffer:
        """Return an object's bytes from `start` to `stop` or the end. Raises FileNotFoundError."""
        with self._attempt():
            try:
                return obstore.get_range(self._large, path, start=start, end=stop)
            except (BaseError, ValueError) as error:
                if not _is_timeout(error) and self._ends_before(path, start):
                    return b""
                raise

    def create(self, path: str, data: Buffer) -> bool:
        """Write a new object. Returns False if `path` already exists."""
        with self._attempt(writes=True):
            try:
                obstore.put(self._large, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    def replace(self, path: str, data: Buffer) -> None:
        """Write an object, or replace it if it exists."""
        with self._attempt(writes=True):
            obstore.put(self._large, path, data, use_multipart=False)

    def delete(self, path: str) -> None:
        """Delete an object if it exists."""
        with self._attempt("delete"):
            try:
                obstore.delete(self._small, path)
            except FileNotFoundError:
                return

    def listed(self, folder: str, most: int) -> list[Listed]:
        """Return at most `most` objects below `folder`."""
        found: list[Listed] = []
        with self._attempt("list"):
            for page in obstore.list(self._small, f"{folder}/", chunk_size=min(most, PAGE)):
                found += [Listed(one["path"], one["size"], one["last_modified"]) for one in page]
                if len(found) >= most:
                    break
        return found[:most]

    def pages(self, folder: str = "") -> Iterator[list[Listed]]:
        """Yield all objects below a folder in pages of at most `PAGE` objects. A page may lack
        objects that change at the same time."""
        stream = obstore.list(self._large, f"{folder}/" if folder else None, chunk_size=PAGE)
        while True:
            with self._attempt("list"):
                page = next(stream, None)
            if page is None:
                return
            yield [Listed(one["path"], one["size"], one["last_modified"]) for one in page]

    def folders(self, folder: str = "") -> list[str]:
        """Return the paths of the subfolders of a folder."""
        with self._attempt("list"):
            return list(obstore.list_with_delimiter(self._large, folder or None)["common_prefixes"])

    def delete_all(self, paths: Sequence[str]) -> None:
        """Delete the objects at `paths`. At most `PAGE` paths are allowed."""
        with self._attempt("delete"):
            try:
                obstore.delete(self._large, list(paths))
            except FileNotFoundError:  # a folder store stops at a missing object
                for path in paths:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._large, path)

    def keeps_versions(self) -> bool:
        """Return True if deleted objects stay as old versions, as in a versioned S3 bucket. Writes
        and deletes an object to find out."""
        path = f"probes/{os.urandom(8).hex()}"
        with self._attempt(writes=True):
            version = obstore.put(self._small, path, b"probe", use_multipart=False)["version"]
        self.delete(path)
        return isinstance(self._small, S3Store) and version not in (None, "null")

    def _ends_before(self, path: str, start: int) -> bool:
        with suppress(BaseError, OSError, ValueError):
            return obstore.head(self._small, path)["size"] <= start
        return False

    @contextmanager
    def _attempt(self, what: str = "", *, writes: bool = False) -> Iterator[None]:
        if self.is_open:
            raise UnavailableError("the object store failed a moment ago: wait before a retry")
        try:
            if self._folder is not None:
                self._folder.require()
            yield
        except NotSupportedError as error:
            raise UnavailableError(_line(error)) from error
        except (BaseError, OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and not (writes or _NO_BUCKET in str(error)):
                self._record(what, error=None)
                raise
            self._record(what, error, writes=writes)  # in a write, only the bucket can be missing
            raise UnavailableError(_line(error)) from error
        self._record(what, error=None, writes=writes)

    def _record(self, what: str, error: Exception | None, *, writes: bool = False) -> None:
        with self._lock:
            self._backoff.record(succeeded=error is None)
            while error is not None and _is_timeout(error) and not self._backoff.is_on():
                self._backoff.record(succeeded=False)
            if writes:
                self._refused = 0 if error is None else self._refused + 1
            said = self._sentences(what, error, writes=writes)
            sentences = [one for one in said if one is not None]
        for one in sentences:
            self._notify(one)

    def _sentences(
        self, what: str, error: Exception | None, *, writes: bool
    ) -> Iterator[str | None]:
        """Yield sentences about a failure. A full store leaves the breaker closed for reads."""
        refuses = self._refuses.get(what)
        if error is None:
            yield self._fails.ended()
            yield self._takes_nothing.ended() if writes else None
            yield None if refuses is None else refuses.ended()
        elif self._backoff.is_on():
            yield self._fails.begun(_line(error))
        elif self._refused >= FAILURES:
            yield self._takes_nothing.begun(_line(error))
        elif refuses is not None and _is_refusal(error):
            yield refuses.begun(_line(error))


class SharedFolder:
    """A folder that several machines mount. While it is not mounted, writes would go to the local
    disk."""

    def __init__(self, path: Path) -> None:
        """Raise InvalidRequestError if the folder does not exist."""
        self._path = path
        if not path.is_dir():
            raise InvalidRequestError(f"remote_store: {path} is not a folder; mount or create it")
        real = path.resolve()
        self._mount = next(one for one in (real, *real.parents) if os.path.ismount(one))

    def require(self) -> None:
        """Raise OSError if the folder is missing or not mounted."""
        if not self._path.is_dir():
            raise OSError(f"the folder {self._path} is gone")  # FileNotFoundError is for objects
        if not os.path.ismount(self._mount):
            raise OSError(f"{self._mount} is no longer mounted")


class _Outage:
    """Reports the beginning and the end of failures. Not thread-safe."""

    def __init__(self, begun: str, ended: str, clock: Callable[[], float]) -> None:
        self._begun = begun
        self._ended = ended
        self._clock = clock
        self._reported: float | None = None
        self._is_on = False

    def begun(self, reason: str) -> str | None:
        now = self._clock()
        if self._is_on or (self._reported is not None and now - self._reported < _REPORT_SECONDS):
            return None
        self._reported, self._is_on = now, True
        return f"{self._begun}: {reason}"

    def ended(self) -> str | None:
        was_on, self._is_on = self._is_on, False
        return self._ended if was_on else None


def _folder_of(url: str) -> SharedFolder | None:
    parts = urlsplit(url)
    return SharedFolder(Path(unquote(parts.path))) if parts.scheme == "file" else None


def _connected(url: str, seconds: float, *, signs_bodies: bool = True) -> ObjectStore:
    """Connect to the store at `url`. Signing the bodies for S3 would take as long as sending
    them."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise InvalidRequestError(
            f"remote_store: expected {', '.join(f'{one}://…' for one in SCHEMES[:-1])}, "
            f"got {parts.scheme or 'no scheme'}"
        )
    try:
        if parts.scheme in ("file", "memory"):
            return from_url(url)
        in_clear = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
        client: ClientConfig = {
            "timeout": timedelta(seconds=seconds),
            "connect_timeout": _CONNECT,
            "allow_http": in_clear,
        }
        retry: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)}
        if parts.scheme != "s3":
            return from_url(url, client_options=client, retry_config=retry)
        return from_url(
            url, client_options=client, retry_config=retry, unsigned_payload=not signs_bodies
        )
    except (BaseError, OSError, ValueError) as error:
        raise InvalidRequestError(f"remote_store: {_line(error)}") from error


def _is_timeout(error: Exception) -> bool:
    return "timed out" in f"{error}" or "TimedOut" in f"{error}"  # excludes `retry_timeout`


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, PermissionDeniedError) or "403 Forbidden" in f"{error}"


def _line(error: Exception) -> str:
    """Return an error in one line. Omits the request's query, which may contain a signature."""
    line, _, structure = str(error).strip().partition("\n")
    found = _REQUEST.search(line)
    if found is None:
        return line[:_MOST_CHARACTERS]
    verb, url = found.groups()
    for place, variables in _NO_CREDENTIALS.items():
        if place in url:
            return f"no credentials: expected {variables} in the environment"
    reason = line[found.end() :].split("<", 1)[0].rstrip(": ")
    said = _ANSWER.search(str(error))
    causes = _CAUSE.findall(structure)
    if said is not None:
        reason = ": ".join([reason, *filter(None, said.groups())])
    elif causes:
        cause = "".join(causes[-1])
        reason = _CERTIFICATES.get(cause, cause.replace("TimedOut", "no answer in time"))
    return f"{reason} ({verb} {url})"[:_MOST_CHARACTERS]
