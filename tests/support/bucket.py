"""An object store in memory whose clock is given, and that several processes use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from obstore.store import MemoryStore
from typing_extensions import Buffer

from semantic_fleet.objects.objects import Listed, Objects
from tests.support.fake_clock import FakeClock


class Bucket:
    """Objects that are written at the time of `clock`, which no process has."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore()
        self.times: dict[str, datetime] = {}

    def objects(self) -> Process:
        """The store as one more process sees it."""
        return Process(self)

    def paths(self, part: str = "") -> set[str]:
        """The objects whose paths have a part."""
        return {one.path for page in self.objects().pages() for one in page if part in one.path}

    def bytes_of(self, part: str = "") -> int:
        """The bytes of those."""
        pages = self.objects().pages()
        return sum(one.n_bytes for page in pages for one in page if part in one.path)


class Process(Objects):
    """One process's view: its calls are counted, and `before` each something may happen."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(bucket.store, clock=FakeClock())
        self._bucket = bucket
        self.calls: Counter[str] = Counter()
        self.before: Callable[[str], None] = lambda _: None

    def create(self, path: str, data: Buffer) -> bool:
        self._called("create")
        made = super().create(path, data)
        if made:
            self._written(path)
        return made

    def replace(self, path: str, data: Buffer) -> None:
        self._called("replace")
        super().replace(path, data)
        self._written(path)

    def listed(self, folder: str, most: int) -> list[Listed]:
        self._called("listed")
        return [self._timed(one) for one in super().listed(folder, most)]

    def pages(self, folder: str = "") -> Iterator[list[Listed]]:
        self._called(f"pages of {folder}")
        for page in super().pages(folder):
            self._called("page")
            yield [self._timed(one) for one in page]

    def delete_all(self, paths: Sequence[str]) -> None:
        self._called("delete_all")
        super().delete_all(paths)

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        self.before(name)

    def _written(self, path: str) -> None:
        self._bucket.times[path] = datetime.fromtimestamp(self._bucket.clock(), UTC)

    def _timed(self, one: Listed) -> Listed:
        return replace(one, written=self._bucket.times[one.path])
