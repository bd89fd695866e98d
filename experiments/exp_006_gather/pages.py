"""EXP-006 where caches lie in pages: what restoring an agent moves, and what a whole copy costs.

Run: python -m experiments.exp_006_gather.pages [--output DIR] [--small]
     python -m experiments.exp_006_gather.pages --draw result_gpu.json

The plan counts blocks layer by layer: 8,192 tokens of Gemma 3 12B are 32 blocks in each of 8 full
layers and 4 in each of 40 windows, 416. A column holds a block of all layers of a kind, so these
are 32 columns of the full layers and 4 of the windows. A ring has a fifth column, which holds the
256 tokens behind the window as well: with it an agent has 456 blocks. Both are measured.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
import mlx.core as mx

from experiments.exp_006_gather.layouts import Layout, Token, all_full, gemma
from experiments.exp_006_gather.scaling import fit
from experiments.exp_006_gather.timing import Line, Lines, compare, in_turns, keyed, number, table
from experiments.harness.document import Json, ResultError, Scalar
from experiments.harness.plots import Plot, draw
from experiments.harness.record import Run
from experiments.harness.report import show as in_words
from experiments.harness.result import Result, Verdict
from experiments.harness.stats import summarise
from semantic.adapters.mlx.kv_cache.forms import find_kernels
from semantic.adapters.mlx.kv_cache.paged.attention import PagedAttention, PortableAttention
from semantic.adapters.mlx.kv_cache.paged.cache import PagedCache
from semantic.adapters.mlx.kv_cache.paged.layers import PagedLayers
from semantic.adapters.mlx.kv_cache.paged.page_pool import (
    PagedBlock,
    PagePool,
    PageTable,
    page_kinds,
)
from semantic.domain.entities import AgentBlocks
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import BLOCK_TOKENS

ID = "EXP-006"
QUESTION = (
    "What does it cost to turn an agent's blocks into caches again where caches lie in pages?"
)
CRITERION = (
    "restoring a resident agent of 8,192 tokens copies 0 bytes; copying all its columns to others "
    "takes less than 1.3 ms at p95 on an H200 for Gemma 3 12B's 8 full and 40 window layers, both "
    "with 416 blocks and with 456; the standard deviation is below 20 % of the mean there and for "
    "48 layers of 32 blocks; from 2K to 16K tokens the time is linear in bytes: a least-squares "
    "line through the medians at six lengths has R² of 0.98 or more; a run with less than Gemma's "
    "bytes per token, or without kernels, can only fail it"
)
LIMIT_MS = 1.3
MOST_DEVIATION = 0.2
LEAST_R_SQUARED = 0.98

TRUE_SIZE: dict[str, Scalar] = {
    "kv_heads": 8, "head_dim": 256, "dtype": "bfloat16", "samples": 150, "warmup": 5,
}  # fmt: skip
SMALL: dict[str, Scalar] = {**TRUE_SIZE, "kv_heads": 1, "head_dim": 16, "samples": 3, "warmup": 1}
GEMMA_TOKEN = Token(8, 256, mx.bfloat16)

GEMMA, GEMMA_AS_WE_LEAVE_IT = gemma(8192), gemma(8192, window_blocks=5)
LIMITED = (GEMMA.name, GEMMA_AS_WE_LEAVE_IT.name)
HALF, FULL = all_full(48, 16), all_full(48, 32)
CONTEXTS = [gemma(context) for context in (2048, 4096, 6144, 8192, 12288, 16384)]
SPARE = 4
"""Columns of a kind that no agent has: so that places are random to the last."""

GATHER, PER_LAYER = "columns", "per layer"
PLAIN_COPY, PLAIN_PASS = "plain copy", "plain pass"
PLAIN = (PLAIN_COPY, PLAIN_PASS)
TAKE_OVER, GROW = "take over", "take over and grow"
SHARE, SHARE_WITHIN = "share", "share, within a block"
STILL = ("copied_bytes", "peak_bytes", "active_change")
"""What of `moved` is 0 where nothing is copied."""
_INTO_THE_LAST = 100
"""Tokens that the last block lacks in `SHARE_WITHIN`."""

FILE = "result_gpu.json"
PLOTS = (
    Plot(
        "pages_gather.svg",
        "All columns of an agent of 8,192 tokens to other columns",
        x="mb",
        y="ms",
        series="way",
        x_label="MB in the blocks",
        y_label="ms",
        x_scale="log",
        y_scale="log",
    ),
    Plot(
        "pages_scaling.svg",
        "Gemma 3 12B's columns, 2K to 16K tokens",
        x="mb",
        y="scaling_ms",
        series="way",
        x_label="MB in the blocks",
        y_label="ms",
    ),
)

_PARTS = 16
"""Of what plain copies read, while it is made: so that random numbers need little memory."""

Way = Callable[[], object]
Pair = tuple[list[PagedCache], list[PagedCache]]
"""An agent that is copied, and one whose columns it is copied to."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Columns of one kind that are copied to others in one call."""

    pages: PagePool
    attention: PagedAttention
    columns: list[int]
    to: list[int]

    def start(self) -> mx.array:
        """What to evaluate."""
        return self.attention.copy(self.pages, self.columns, self.to)

    def is_there(self) -> bool:
        """Whether each column holds what it was copied from."""
        data = self.pages.data
        pairs = zip(self.columns, self.to, strict=True)
        return all(bool(mx.array_equal(data[a], data[b]).item()) for a, b in pairs)


class Pool:
    """The pages of a model of one shape: random numbers in them, free columns in random order."""

    def __init__(self, layout: Layout, token: Token) -> None:
        """With room for two agents of `layout`, and SPARE columns of each kind."""
        self._context = layout.context
        self.spec = layout.spec(token)
        kinds = page_kinds(self.spec, [token.layer_shape] * self.spec.n_layers)
        if kinds is None:
            raise AssertionError(f"{layout.name} has no pages")
        attention = [find_kernels(kind) or PortableAttention() for kind in kinds]
        self.layers = PagedLayers(self.spec, kinds, attention)
        for pages, one in zip(self.layers.pools, attention, strict=True):
            pages.grow(2 * PageTable(pages).pages_for(layout.context) + SPARE)
            fill(pages, one, range(pages.n_pages))
            _scatter(pages)

    @property
    def attention(self) -> str:
        """What computes over the pages."""
        return ", ".join(sorted({type(one).__name__ for one in self.layers.attention}))

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(pages.nbytes for pages in self.layers.pools)

    def caches(self, context: int) -> list[PagedCache]:
        """An agent's caches after `context` tokens, wherever there was room."""
        caches = self.layers.empty(context)
        for cache in caches:
            ring = cache.table.pool.kind.ring
            cache.offset = context
            cache.first = 0 if ring is None else max(0, context - ring * BLOCK_TOKENS)
        return caches

    def agent(self, context: int) -> AgentBlocks:
        """The same as blocks."""
        counts = self.spec.blocks_for(context)
        pool = BlockPool(self.spec, total_blocks=sum(counts))
        blocks = pool.allocate_layers(counts, "agent")
        if self.layers.fill(self.caches(context), blocks, context):
            raise AssertionError("an agent with blocks that hold nothing")
        agent = AgentBlocks("agent", total_tokens=context)
        for block in (block for layer in blocks for block in layer):
            agent.add_block(block)
        return agent

    def pair(self) -> Pair:
        """Two agents as long as there is room for."""
        return self.caches(self._context), self.caches(self._context)

    def copies(self, layout: Layout, pair: Pair) -> list[Copy]:
        """What copies the columns that `layout` has: a call for each kind."""
        copies: list[Copy] = []
        for kind, attention in enumerate(self.layers.attention):
            pages = self.layers.pools[kind]
            last = layout.context // BLOCK_TOKENS
            blocks = range(last - layout.blocks[pages.kind.layers[0]], last)
            ring = pages.kind.ring or last
            columns, to = (
                [caches[0].sequence.tables[kind].pages[block % ring] for block in blocks]
                for caches in pair
            )
            copies.append(Copy(pages, attention, columns, to))
        return copies


class Bench:
    """Times the ways to copy agents of one token's size, and keeps the raw samples.

    `flat` is what plain copies read, and the plan's way.
    """

    def __init__(self, token: Token, samples: int, warmup: int) -> None:
        self.token = token
        self.rows: list[dict[str, Scalar]] = []
        self.wrong: list[str] = []
        self._samples, self._warmup = samples, warmup
        largest = max(layout.n_blocks for layout in (FULL, *CONTEXTS))
        part = token.block_bytes * largest // _PARTS // token.dtype.size
        self._flat = mx.concatenate([random_array((part,), token.dtype) for _ in range(_PARTS)])
        mx.eval(self._flat)

    def gather(self, pool: Pool, layout: Layout, pair: Pair) -> Lines:
        """All ways to copy `layout`."""
        ways: dict[str, Way] = {
            GATHER: self._columns(pool, layout, pair),
            PLAIN_COPY: plain_copy(self._bytes_of(layout)),
            PLAIN_PASS: plain_pass(self._bytes_of(layout)),
            PER_LAYER: per_layer(layout, self.token, self._flat),
        }
        times = self.times(ways)
        n_bytes = layout.n_blocks * self.token.block_bytes
        for name, found in times.items():
            head = _head(layout, name, n_bytes)
            self.rows += [{**head, "ms": round(ms, 4)} for ms in found[1:]]
        return compare(times, n_bytes, PLAIN)

    def contexts(self, pool: Pool, pair: Pair) -> dict[str, Lines]:
        """Columns beside a plain pass at all lengths, in turns."""
        ways: dict[str, Way] = {}
        for layout in CONTEXTS:
            ways[f"{GATHER} {layout.name}"] = self._columns(pool, layout, pair)
            ways[f"{PLAIN_PASS} {layout.name}"] = plain_pass(self._bytes_of(layout))
        times = self.times(ways)
        found: dict[str, Lines] = {}
        for layout in CONTEXTS:
            n_bytes = layout.n_blocks * self.token.block_bytes
            mine = {name: times[f"{name} {layout.name}"] for name in (GATHER, PLAIN_PASS)}
            for name, each in mine.items():
                head = _head(layout, name, n_bytes)
                self.rows += [{**head, "scaling_ms": round(ms, 4)} for ms in each[1:]]
            found[layout.name] = compare(mine, n_bytes, [PLAIN_PASS])
        return found

    def restores(self, pool: Pool, context: int) -> Lines:
        """All ways to restore a resident agent: their times, and what they move."""
        agent = pool.agent(context)
        ways = {
            TAKE_OVER: restore(pool, agent, context, context, exclusive=True),
            GROW: restore(pool, agent, context, context + BLOCK_TOKENS, exclusive=True),
            SHARE: restore(pool, agent, context, context, exclusive=False),
            SHARE_WITHIN: restore(pool, agent, context - _INTO_THE_LAST, context, exclusive=False),
        }
        lines: Lines = {}
        for name, found in self.times(ways).items():
            self.rows += [{"way": name, "restore_ms": round(ms, 4)} for ms in found[1:]]
            known = summarise(found[1:])
            lines[name] = {f"{key}_ms": known[key] for key in ("p50", "p95", "mean", "std")}
            lines[name] |= moved(agent, ways[name])
        return lines

    def times(self, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        """Milliseconds of each way, in turns, with Python's collector at rest."""
        gc.collect()
        gc.disable()
        try:
            found = in_turns(ways, self._samples, self._warmup)
        finally:
            gc.enable()
        mx.clear_cache()
        return found

    def _columns(self, pool: Pool, layout: Layout, pair: Pair) -> Way:
        """Copying columns; it is noted when they are not there afterwards."""
        copies = pool.copies(layout, pair)
        if not copies_right(pool, copies):
            self.wrong.append(f"{layout.name}: a column is not what it was copied from")

        return lambda: mx.eval([copy.start() for copy in copies])

    def _bytes_of(self, layout: Layout) -> mx.array:
        """As many numbers as `layout` has."""
        part = self._flat[: layout.n_blocks * self.token.block_bytes // self.token.dtype.size]
        mx.eval(part)
        return part


def _head(layout: Layout, way: str, n_bytes: int) -> Line:
    return {"shape": layout.name, "way": way, "context": layout.context, "mb": n_bytes / 1e6}


def random_array(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Random numbers, there already."""
    array = mx.random.uniform(-1, 1, shape, dtype)
    mx.eval(array)
    return array


def fill(pages: PagePool, attention: PagedAttention, columns: Sequence[int]) -> None:
    """Put random numbers into columns."""
    for column in columns:
        data = random_array((1, *pages.kind.page_shape), pages.kind.shape.dtype)
        mx.eval(attention.store(pages, [column], data))
    mx.synchronize()


def _scatter(pages: PagePool) -> None:
    """Let the columns, all of them free, be given out in random order."""
    refs = [pages.take() for _ in range(pages.n_pages)]
    random.Random(0).shuffle(refs)
    while refs:
        refs.pop()


def copies_right(pool: Pool, copies: Sequence[Copy]) -> bool:
    """Whether copying fills columns that held something else, and no column beside them."""
    for copy in copies:
        fill(copy.pages, copy.attention, copy.to)
    if any(copy.is_there() for copy in copies):
        return False
    beside = [(pages, pages.take()) for pages in pool.layers.pools]
    before = [-pages.data[ref.index] for pages, ref in beside]
    mx.eval(before)
    mx.eval([copy.start() for copy in copies])
    untouched = all(
        bool(mx.array_equal(-pages.data[ref.index], was).item())
        for (pages, ref), was in zip(beside, before, strict=True)
    )
    return untouched and all(copy.is_there() for copy in copies)


def plain_copy(flat: mx.array) -> Way:
    """As many bytes from one array into another; of one piece MLX would give the piece itself."""
    halves = [flat[: flat.size // 2], flat[flat.size // 2 :]]
    mx.eval(halves)
    return lambda: mx.eval([mx.concatenate(halves)])


def plain_pass(flat: mx.array) -> Way:
    """As many bytes read and written by MLX's simplest kernel."""
    return lambda: mx.eval([-flat])


def per_layer(layout: Layout, token: Token, flat: mx.array) -> Way:
    """The plan's algorithm: for each layer concatenate its blocks' keys and values, evaluate.

    The blocks are pieces of one array, in random order.
    """
    size = token.block_bytes // 2 // token.dtype.size
    shape = (1, token.kv_heads, BLOCK_TOKENS, token.head_dim)
    order = list(range(2 * layout.n_blocks))
    random.Random(1).shuffle(order)
    pieces = [flat[at * size : (at + 1) * size].reshape(shape) for at in order]
    mx.eval(pieces)
    layers: list[tuple[list[mx.array], list[mx.array]]] = []
    for n in layout.blocks:
        mine, pieces = pieces[: 2 * n], pieces[2 * n :]
        layers.append((mine[:n], mine[n:]))

    def reconstruct() -> object:
        cache = []
        for keys, values in layers:
            k, v = mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)
            mx.eval(k, v)
            cache.append((k, v))
        return cache

    return reconstruct


def restore(
    pool: Pool, agent: AgentBlocks, length: int, capacity: int, *, exclusive: bool
) -> Callable[[], list[PagedCache]]:
    """The engine's restore of an agent that is resident."""

    def way() -> list[PagedCache]:
        caches = pool.layers.restored(agent, length, capacity, exclusive=exclusive)
        mx.synchronize()
        return caches

    return way


def moved(agent: AgentBlocks, way: Callable[[], list[PagedCache]]) -> Line:
    """What a restore does to columns and to memory.

    `kept` columns are the agent's own, `copied` ones took their places, `added` ones are room for
    more. `peak_bytes` is 0 only if nothing at all was allocated: the peak is noted at allocations.
    """
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    caches = way()
    peak = mx.get_peak_memory()
    kept = copied = added = n_bytes = 0
    for pages_of in caches[0].sequence.tables:
        page = agent.blocks_for_layer(pages_of.pool.kind.layers[0])[0].layer_data
        if not isinstance(page, PagedBlock):
            raise TypeError("an agent without pages")
        own = [ref.index for ref in page.refs]
        same = [a == b for a, b in zip(own, pages_of.pages[: len(own)], strict=True)]
        kept += sum(same)
        copied += len(same) - sum(same)
        added += len(pages_of.pages) - len(same)
        n_bytes += (len(same) - sum(same)) * pages_of.pool.kind.page_bytes
    return {
        "kept": kept,
        "copied": copied,
        "added": added,
        "copied_bytes": n_bytes,
        "peak_bytes": peak - before if peak else 0,
        "active_change": mx.get_active_memory() - before,
    }


def measure(parameters: Mapping[str, Scalar]) -> Result:
    """Restores, copies and lengths of Gemma's shape, then copies of the plan's second shape."""
    began = time.perf_counter()
    mx.random.seed(0)
    count = {name: int(str(value)) for name, value in parameters.items() if name != "dtype"}
    token = Token(count["kv_heads"], count["head_dim"], getattr(mx, str(parameters["dtype"])))
    model = f"shapes only, on {mx.default_device()}"
    started = Run.start(ID, QUESTION, model=model, parameters=parameters, seed=0)
    bench = Bench(token, count["samples"], count["warmup"])

    pool = Pool(CONTEXTS[-1], token)
    attention, page_bytes = pool.attention, pool.nbytes
    restores = bench.restores(pool, GEMMA.context)
    pair = pool.pair()
    gathers = {x.name: bench.gather(pool, x, pair) for x in (GEMMA, GEMMA_AS_WE_LEAVE_IT)}
    contexts = bench.contexts(pool, pair)
    if pool.nbytes != page_bytes:
        bench.wrong.append("the pages grew while they were measured")
    del pool, pair
    mx.clear_cache()
    pool = Pool(FULL, token)
    pair = pool.pair()
    gathers |= {x.name: bench.gather(pool, x, pair) for x in (HALF, FULL)}

    straight = scaling(contexts, gathers)
    missed = [*bench.wrong, *misses(restores, gathers, straight)]
    if token.block_bytes < GEMMA_TOKEN.block_bytes:
        missed.append(f"{token.block_bytes} bytes per block instead of {GEMMA_TOKEN.block_bytes}")
    if attention == PortableAttention.__name__:
        missed.append("no kernels")
    summary: dict[str, Json] = {
        "restore": keyed(restores),
        "restore_table": [{"way": name, **line} for name, line in restores.items()],
        "gather": {name: keyed(lines) for name, lines in gathers.items()},
        "gather_table": table(gathers),
        "contexts_table": table(contexts),
        "scaling": straight,
        "attention": attention,
        "pages_gb": max(page_bytes, pool.nbytes) / 1e9,
        "seconds": time.perf_counter() - began,
        "missed": list[Json](missed),
    }
    slowest = max(number(gathers[name][GATHER], "p95_ms") for name in LIMITED)
    verdict = Verdict(CRITERION, LIMIT_MS, round(slowest, 3), passed=not missed)
    return started.finish(bench.rows, summary, verdict)


def scaling(contexts: Mapping[str, Lines], gathers: Mapping[str, Lines]) -> dict[str, Json]:
    """How straight the line of medians over bytes is, and what twice the blocks cost."""
    lines = [lines[GATHER] for lines in contexts.values()]
    line = fit([number(x, "mb") for x in lines], [number(x, "p50_ms") for x in lines])
    half, whole = (number(gathers[x.name][GATHER], "mean_ms") for x in (HALF, FULL))
    return {
        "r_squared": line.r_squared,
        "gb_per_s": 1 / line.slope if line.slope else None,
        "intercept_ms": line.intercept,
        "twice_the_blocks": whole / half,
    }


def misses(
    restores: Lines, gathers: Mapping[str, Lines], straight: Mapping[str, Json]
) -> list[str]:
    """What of the criterion is not met, in words."""
    found: list[str] = []
    for name in (TAKE_OVER, GROW):
        changes = {key: restores[name][key] for key in STILL}
        if any(changes.values()):
            found.append(f"{name}: {changes}")
    for shape in (*LIMITED, FULL.name):
        line = gathers[shape][GATHER]
        if shape in LIMITED and number(line, "p95_ms") >= LIMIT_MS:
            found.append(f"{shape}: {number(line, 'p95_ms'):.3f} ms at p95")
        share = number(line, "std_ms") / number(line, "mean_ms")
        if share >= MOST_DEVIATION:
            found.append(f"{shape}: a standard deviation of {share:.0%} of the mean")
    r_squared = straight["r_squared"]
    if not isinstance(r_squared, float) or r_squared < LEAST_R_SQUARED:
        found.append(f"R² is {r_squared}")
    return found


def show(result: Result) -> None:
    """The result in a few lines."""
    summary = result.summary
    print(f"{'':40}{'p50 ms':>9}{'p95':>9}{'mean':>9}{'std':>9}{'GB/s':>8}{'ratio':>7}")
    for row in _records(summary["gather_table"]):
        name = f"{row['shape']}, {row['way']}"
        print(f"{name:40}{_times(row)}{row['gb_per_s']:8.0f}{row['ratio']:7.2f}")
    print(f"{'resident':40}{'':36}{'bytes copied':>15}{'allocated':>12}")
    for row in _records(summary["restore_table"]):
        print(f"{row['way']:40}{_times(row)}{row['copied_bytes']:15}{row['peak_bytes']:12}")
    scale = summary["scaling"]
    if isinstance(scale, dict):
        print(*(f"{key} {in_words(value, '.4g')}" for key, value in scale.items()), sep=", ")
    print(f"{summary['attention']}, {summary['pages_gb']:.1f} GB, {summary['seconds']:.0f} s")
    print("passed" if result.verdict.passed else f"failed: {summary['missed']}")


def _records(rows: Json) -> list[dict[str, Json]]:
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _times(row: Mapping[str, Json]) -> str:
    return "".join(f"{row[f'{key}_ms']:9.3f}" for key in ("p50", "p95", "mean", "std"))


def drawn(path: Path) -> None:
    """Draw a kept result beside it, where there is something to draw with."""
    if find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed", file=sys.stderr)
    else:
        draw(path, PLOTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, keep; or draw what was kept."""
    parser = argparse.ArgumentParser(prog="pages", description=main.__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"where {FILE} goes")
    parser.add_argument(
        "--small", action="store_true", help="few samples of few bytes; kept only with --output"
    )
    parser.add_argument("--draw", type=Path, metavar=FILE, help="measure nothing; draw this")
    options = parser.parse_args(arguments)
    try:
        if options.draw:
            drawn(options.draw)
            return 0
        folder = options.output or (None if options.small else Path(__file__).parent)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        result = measure(SMALL if options.small else TRUE_SIZE)
        if folder:
            result.write(folder / FILE)
            drawn(folder / FILE)
    except (OSError, ResultError) as error:
        print(f"pages: {error}", file=sys.stderr)
        return 1
    show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
