"""The experiment on pages measures what it says: run small, its counts are exact; no times here.

Its yardsticks are tested as well: each must notice what it is there to notice.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from experiments.exp_006_gather import pages
from experiments.exp_006_gather.layouts import Layout, Token, all_full, gemma
from experiments.exp_006_gather.timing import Lines
from experiments.harness.result import Result, read
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.kv_cache.paged.page_pool import PagePool

pytestmark = pytest.mark.process

TOKEN = Token(1, 4, mx.float32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run."""
    folder = tmp_path_factory.mktemp("small") / "new"
    assert pages.main(["--small", "--output", str(folder)]) == 0
    return folder


def line_of(result: Result, *keys: str) -> dict[str, object]:
    found: object = result.summary
    for key in keys:
        assert isinstance(found, dict)
        found = found[key]
    assert isinstance(found, dict)
    return found


def test_a_small_run_is_kept_and_can_only_fail(small: Path) -> None:
    result = read(small / pages.FILE)
    assert not result.verdict.passed
    missed = result.summary["missed"]
    assert isinstance(missed, list)
    assert "16384 bytes per block instead of 2097152" in missed
    assert not any("copied" in str(one) or "grew" in str(one) for one in missed)


def test_a_resident_agent_is_restored_without_a_byte(small: Path) -> None:
    result = read(small / pages.FILE)
    for way, added in (("take_over", 0), ("take_over_and_grow", 1)):
        line = line_of(result, "restore", way)
        assert (line["kept"], line["copied"], line["added"]) == (37, 0, added)
        assert (line["copied_bytes"], line["peak_bytes"], line["active_change"]) == (0, 0, 0)


def test_a_shared_agent_gives_away_all_but_what_is_written_to(small: Path) -> None:
    result = read(small / pages.FILE)
    block = Token(1, 16, mx.bfloat16).block_bytes
    for way, kept, copied_bytes in (
        ("share", 32, 5 * 40 * block),
        ("share_within_a_block", 31, (5 * 40 + 8) * block),
    ):
        line = line_of(result, "restore", way)
        assert (line["kept"], line["copied_bytes"]) == (kept, copied_bytes)


def test_every_way_is_sampled_as_often(small: Path) -> None:
    result = read(small / pages.FILE)
    for field, n_ways in (("ms", 16), ("scaling_ms", 12), ("restore_ms", 4)):
        assert sum(field in row for row in result.samples) == n_ways * 3


def test_a_kept_result_is_drawn_later(small: Path) -> None:
    pytest.importorskip("matplotlib")
    for plot in pages.PLOTS:
        (small / plot.file).unlink()
    assert pages.main(["--draw", str(small / pages.FILE)]) == 0
    assert all((small / plot.file).stat().st_size for plot in pages.PLOTS)


def test_a_result_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pages.main(["--draw", str(tmp_path / pages.FILE)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# --- the yardsticks ---------------------------------------------------------------------------


class Forgetful(PortableAttention):
    """Forgets the last column."""

    def copy(self, pool: PagePool, pages: list[int], to: list[int]) -> mx.array:
        return super().copy(pool, pages[:-1], to[:-1])


class Careless(PortableAttention):
    """Writes to all columns that it was not asked for as well."""

    def copy(self, pool: PagePool, pages: list[int], to: list[int]) -> mx.array:
        done = super().copy(pool, pages, to)
        others = sorted(set(range(pool.n_pages)) - {*pages, *to})
        return super().copy(pool, pages[:1] * len(others), others) if others else done


@pytest.mark.parametrize(
    ("attention", "right"), [(PortableAttention(), True), (Forgetful(), False), (Careless(), False)]
)
def test_a_copy_that_is_wrong_is_noticed(
    attention: PortableAttention, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "find_kernels", lambda _: attention)
    layout = gemma(2048)
    pool = pages.Pool(layout, TOKEN)
    assert pages.copies_right(pool, pool.copies(layout, pool.pair())) is right


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (gemma(8192), [4, 32]),
        (gemma(8192, window_blocks=5), [5, 32]),
        (gemma(2048), [4, 8]),
        (all_full(48, 16), [16]),
    ],
)
def test_the_columns_copied_are_those_that_the_plan_counts(
    layout: Layout, counts: list[int]
) -> None:
    pool = pages.Pool(layout, TOKEN)
    copies = pool.copies(layout, pool.pair())
    assert [len(copy.columns) for copy in copies] == counts
    blocks = sum(len(copy.columns) * len(copy.pages.kind.layers) for copy in copies)
    assert blocks == layout.n_blocks
    for copy in copies:
        assert len({*copy.columns, *copy.to}) == 2 * len(copy.columns)
        assert copy.columns != sorted(copy.columns), "they are meant to be scattered"


def test_of_a_ring_the_last_blocks_are_copied() -> None:
    layout = gemma(8192)
    pool = pages.Pool(layout, TOKEN)
    pair = pool.pair()
    ring = pair[0][0].table.pages
    assert len(ring) == 5
    # Blocks 28 to 31 in a ring of five.
    assert pool.copies(layout, pair)[0].columns == [ring[3], ring[4], ring[0], ring[1]]


def lines(p95: float, std: float) -> Lines:
    return {pages.GATHER: {"p95_ms": p95, "mean_ms": 1.0, "std_ms": std}}


def test_the_verdict_names_everything_that_was_missed() -> None:
    nothing = dict.fromkeys(pages.STILL, 0)
    restores: Lines = {pages.TAKE_OVER: {**nothing}, pages.GROW: {**nothing}}
    shapes = {name: lines(1.29, 0.19) for name in (*pages.LIMITED, pages.FULL.name)}
    shapes[pages.FULL.name] = lines(9.0, 0.19)
    assert pages.misses(restores, shapes, {"r_squared": 0.98}) == []
    restores[pages.GROW] = {**nothing, "peak_bytes": 1}
    shapes[pages.LIMITED[0]] = lines(1.3, 0.19)
    shapes[pages.FULL.name] = lines(9.0, 0.2)
    missed = pages.misses(restores, shapes, {"r_squared": 0.97})
    assert len(missed) == 4
