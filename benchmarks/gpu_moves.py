"""`python -m benchmarks.gpu_moves`: ways to move pages between a GPU and host memory, side by side.

Pages of the 8B shape (33.5 MB). MLX's arrays looked at from the host, the driver's copy engine with
memory that is new, pageable or used again, by one thread and by several, alone and beside products
of matrices. Prints JSON lines and writes them to `--output DIR`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from semantic.adapters.mlx.arrays import array_from, bytes_of
from semantic.adapters.mlx.cuda.copies import CudaDriver, copies_rightly
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention, PortableAttention
from semantic.adapters.mlx.kv_cache.paged.dialect import dialect_here
from semantic.adapters.mlx.kv_cache.paged.kernels import PagedKernels
from semantic.adapters.mlx.kv_cache.paged.page_pool import PageKind, PagePool
from semantic.adapters.mlx.kv_cache.spec_reader import LayerShape
from semantic.adapters.mlx.transfers import CopyDriver, Rows, address_of
from tests.support.host_driver import HostDriver

COUNTS, THREADS, ROUNDS = (1, 8, 32), (1, 2, 4, 8), 3
PRODUCTS, SIZE = 60, 8192


class Moves:
    """A pool of pages, and a device to copy with."""

    def __init__(self, *, small: bool, output: Path) -> None:
        shape = LayerShape(2, 64, 64, mx.float32) if small else LayerShape(8, 128, 128, mx.bfloat16)
        self.kind = PageKind(tuple(range(4 if small else 32)), shape)
        self.n_pages = 8 if small else 40
        self.pool = PagePool(self.kind)
        self.pool.grow(self.n_pages)
        dialect = dialect_here()
        self.attention: PagedAttention = PortableAttention()
        if dialect is not None:
            self.attention = PagedKernels(self.kind, dialect)
        self.driver: CopyDriver = HostDriver() if small else CudaDriver()
        self.size = self.kind.page_bytes
        self.matrix = mx.random.normal((512 if small else SIZE,) * 2).astype(shape.dtype)
        mx.eval(self.matrix)
        self.output = output / "gpu_moves.json"
        self.lines: list[dict[str, object]] = []
        output.mkdir(parents=True, exist_ok=True)

    def note(self, what: str, **found: object) -> None:
        """One result."""
        self.lines.append({"what": what, **found})
        print(json.dumps(self.lines[-1]), flush=True)
        self.output.write_text(json.dumps(self.lines, indent=1) + "\n", encoding="utf-8")

    def timed(self, what: str, n: int, move: Callable[[], object], **more: object) -> None:
        """Milliseconds and GB per second of `move`, which moves `n` pages."""
        found: list[float] = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            move()
            found.append(time.perf_counter() - begin)
        self.note(
            what, pages=n, first_ms=1e3 * found[0], ms=1e3 * statistics.median(found),
            gb_s=n * self.size / min(found) / 1e9, **more,
        )  # fmt: skip

    def mlx(self) -> None:
        """The ways through MLX's arrays."""

        def fetch() -> bytes:
            page = mx.contiguous(self.pool.data[1] + 0)
            mx.eval(page)
            return bytes(bytes_of(page))

        def send() -> None:
            data = array_from(body, self.kind.shape.dtype, (1, *self.kind.page_shape))
            mx.eval(self.attention.store(self.pool, [0], data))

        body = fetch()
        self.timed("MLX: to host, bytes of a new array", 1, fetch)
        self.timed("MLX: to device, array_from and store", 1, send)
        mx.clear_cache()

    def memory(self) -> list[int]:
        """New pinned memory, by one thread and by several; returns some to use again."""
        made: list[int] = []
        for n in THREADS[:3]:
            with ThreadPoolExecutor(n) as threads:
                begin = time.perf_counter()
                made += list(threads.map(lambda _: self.driver.allocate(self.size), range(8)))
                seconds = time.perf_counter() - begin
            self.note("new pinned memory", threads=n, ms_per_page=1e3 * seconds / 8,
                      gb_s=8 * self.size / seconds / 1e9)  # fmt: skip
        begin = time.perf_counter()
        bytearray(self.size)
        self.note("new pageable memory", ms_per_page=1e3 * (time.perf_counter() - begin))
        a, b, *_ = made
        self.timed("memmove of pinned memory", 1, lambda: ctypes.memmove(a, b, self.size))
        target = bytearray(self.size)
        to = address_of(memoryview(target))
        self.timed("memmove to touched memory", 1, lambda: ctypes.memmove(to, a, self.size))
        return made

    def copies(self, pinned: list[int]) -> None:
        """The copy engine with pinned memory that was used before."""
        first = self.driver.address(self.pool.data)
        whole = Rows(1, self.size, self.size)
        heads = 2 * len(self.kind.layers) * self.kind.shape.kv_heads
        part = Rows(heads, self.size // heads // 2, self.size // heads)

        def fetch(i: int) -> None:
            self.driver.to_host(pinned[i % len(pinned)], self._page(first, i), whole)

        def send(i: int) -> None:
            self.driver.to_device(self._page(first, i), pinned[i % len(pinned)], whole)

        for name, move in (("to host", fetch), ("to device", send)):
            for n in COUNTS:
                for threads in THREADS if n > 1 else THREADS[:1]:
                    with ThreadPoolExecutor(threads) as pool:
                        self.timed(f"engine: {name}", n,
                                   lambda: list(pool.map(move, range(n))), threads=threads)  # noqa: B023  # fmt: skip
        self.timed("engine: half of each head to host", 1,
                   lambda: self.driver.to_host(pinned[0], first, part))  # fmt: skip
        self.timed("engine: half of each head to device", 1,
                   lambda: self.driver.to_device(first, pinned[0], part))  # fmt: skip
        pageable, data = bytearray(self.size), bytes(self.size)
        to = address_of(memoryview(pageable))
        self.timed("engine: to touched pageable memory", 1,
                   lambda: self.driver.to_host(to, first, whole))  # fmt: skip
        self.timed("engine: from pageable bytes", 1,
                   lambda: self.driver.to_device(first, address_of(data), whole))  # fmt: skip
        self.beside("copies to host", lambda: fetch(1))
        self.beside("copies to device", lambda: send(1))
        self.beside("new pinned memory", lambda: self.driver.free(self.driver.allocate(self.size)))

    def beside(self, what: str, move: Callable[[], object]) -> None:
        """Products of matrices while another thread moves."""
        alone, _ = self._multiply(None)
        together, moved = self._multiply(move)
        self.note(f"beside products: {what}", alone_ms=1e3 * alone, together_ms=1e3 * together,
                  moved_gb_s=moved * self.size / together / 1e9)  # fmt: skip

    def _multiply(self, move: Callable[[], object] | None) -> tuple[float, int]:
        """Seconds of the products, and how many times `move` ended meanwhile."""
        ended, moved = threading.Event(), 0

        def work() -> None:
            nonlocal moved
            while move is not None and not ended.is_set():
                move()
                moved += 1

        thread = threading.Thread(target=work)
        thread.start()
        begin = time.perf_counter()
        for _ in range(PRODUCTS // 10):
            result = self.matrix
            for _ in range(10):
                result = result @ self.matrix * 1e-2
            mx.eval(result)
        seconds = time.perf_counter() - begin
        ended.set()
        thread.join()
        return seconds, moved

    def _page(self, first: int, i: int) -> int:
        return first + i % self.n_pages * self.size


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small pages, on a CPU")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    moves = Moves(small=cast(bool, given.small), output=given.output)
    moves.note("setup", page_mb=moves.size / 1e6, copies_rightly=copies_rightly(moves.driver))
    moves.mlx()
    moves.copies(moves.memory())


if __name__ == "__main__":
    main()
