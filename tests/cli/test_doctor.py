"""`semantic doctor` and the memory budget: what is there, what is wrong, what to do about it."""

from __future__ import annotations

import builtins
import errno
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from semantic.adapters.mlx import device
from semantic.adapters.mlx.batch.padded_batch import even
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.application.engine.batch_engine import BlockPoolBatchEngine
from semantic.bootstrap import assemble
from semantic.cli import doctor
from semantic.cli.doctor import SUPPORTED, check_blas, check_version
from semantic.cli.options import ModelsOptions
from semantic.composition import memory_shares
from semantic.composition.engine_settings import DEFAULT_MODEL, NamedAdapter, Settings
from semantic.composition.memory_shares import (
    default_memory_tier_bytes,
    default_pool_bytes,
    default_process_bytes,
    planned_bytes,
    promised,
)
from semantic.composition.named_models import find_model
from semantic.domain.errors import CapacityError, InvalidRequestError, PoolExhaustedError
from semantic.domain.services import BlockPool
from semantic.domain.value_objects import Lane
from semantic.serve import ServeSettings
from semantic.serve_models import ModelsSettings, plan_models
from tests.cli.support import ROOT, FakeProvider, process, semantic
from tests.support.adapter_folder import write_adapter
from tests.support.char_tokenizer import CharTokenizer
from tests.support.in_pages import tiny_backend
from tests.support.model_folder import small_model, write_model
from tests.support.tiny_models import VOCAB, tiny_model
from tests.support.unusual_models import unusual_model

NAMES = [
    "semantic", "python", "platform", "mlx", "mlx-lm", "kernels", "device", "memory", "blas",
    "identity", "store", "embedded model", "model", "calls", "ragged caches", "caches",
    "exact batch", "drafts", "pool", "fits",
]  # fmt: skip
GIB = 1 << 30


def verdicts(output: str) -> Mapping[str, str]:
    document = json.loads(output)
    return {finding["name"]: finding["verdict"] for finding in document["findings"]}


@pytest.mark.process
def test_everything_works_here() -> None:
    ran = process("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert "'Your name is Ada.'" in ran.out
    assert "all 5 layers" in ran.out


def test_json_lists_every_finding() -> None:
    ran = semantic("doctor", "--json", "--pool-blocks", "40")
    document = json.loads(ran.out)
    assert [finding["name"] for finding in document["findings"]] == NAMES
    fields = {"name", "verdict", "detail", "advice"}
    assert all(set(finding) == fields for finding in document["findings"])
    assert document["passed"] is True
    assert document["findings"][-2]["detail"].startswith("40 blocks; ")


def test_a_disk_that_takes_nothing_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(use_disk=True, store=tmp_path)
    good = doctor.check_store(settings)
    assert (good.verdict, good.detail.endswith("free on its disk")) == ("ok", True)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    bad = doctor.check_store(settings)
    said = f"cannot write in {tmp_path}: No space left on device"
    assert (bad.verdict, bad.detail) == ("warning", said)
    assert bad.advice == "caches stay in memory only; --store names another folder"


def test_sizes_that_nothing_can_have_are_refused_or_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran = semantic("run", "Hello!", "--pool-gb", "900000")
    assert (ran.code, ran.out) == (2, "")
    assert "pool_bytes must be at most the device's memory" in ran.err
    assert "got 900000.0 GiB" in ran.err
    found = doctor.check_model(Settings(use_disk=True, store=tmp_path, disk_bytes=1000))
    assert all(one.verdict == "ok" for one in found)
    [said] = caplog.messages
    assert re.fullmatch(r"disk_bytes: the disk keeps no block .* bytes, the limit is 1000", said)


def test_weights_that_are_ignored_are_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3_coder")
    assert list(doctor.check_weights(str(model))) == []
    (model / "consolidated.safetensors").touch()
    [found] = doctor.check_weights(str(model))
    assert (found.verdict, found.detail) == (
        "warning",
        f"ignored in {model}: consolidated.safetensors",
    )


def test_an_adapter_is_checked_against_the_model(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql", find_model(DEFAULT_MODEL))
    found = doctor.check_adapter(DEFAULT_MODEL, NamedAdapter("sql", folder))
    assert (found.verdict, found.name) == ("ok", "adapter")
    assert found.detail.startswith("semantic-tiny+sql, LoRA of rank 4, ")
    other = write_model(tmp_path / "other", "qwen3_coder")
    wrong = doctor.check_adapter(str(other), NamedAdapter("sql", folder))
    assert (wrong.verdict, "is not one of this model" in wrong.detail) == ("failed", True)


def test_of_several_models_it_says_what_fits_for_each_and_together(tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "qwen3_coder")
    adapter = write_adapter(tmp_path / "sql", other)
    options = ModelsOptions(model=[DEFAULT_MODEL, str(other)], no_store=True)

    def found(*adapters: str) -> list[doctor.Finding]:
        return list(doctor.check_models(doctor._served(options, adapters)))

    findings = found(f"other+sql={adapter}")
    assert [one.name for one in findings] == [*NAMES[-8:], *NAMES[-8:], "adapter", "together"]
    assert {one.verdict for one in findings} == {"ok"}
    assert "other+sql, LoRA" in findings[-2].detail
    assert findings[-1].detail.startswith("all 3 models at once: ")
    wrong = found(f"{DEFAULT_MODEL}+sql={adapter}")
    assert [one.verdict for one in wrong] == [*["ok"] * 8, "failed", *["ok"] * 8, "failed"]
    with pytest.raises(InvalidRequestError, match="must be one of"):
        found(f"sql={adapter}")


def test_models_that_do_not_fit_together_take_turns_and_one_that_never_fits_is_a_failure() -> None:
    engine = Settings(process_bytes=GIB, pool_bytes=1 << 20)
    models = [ServeSettings(engine, names) for names in (("a",), ("b",))]
    plan = plan_models(ModelsSettings(models))
    assert plan.n_bytes < sum(one.weights.n_bytes + one.n_bytes for one in plan.models)
    assert doctor.check_together(replace(plan, capacity=plan.n_bytes)).detail.startswith("all 2")
    short = doctor.check_together(replace(plan, capacity=plan.n_bytes - 1))
    assert (short.verdict, short.detail.startswith("not all 2 models at once, ")) == ("ok", True)
    never = doctor.check_together(replace(plan, capacity=1))
    assert (never.verdict, never.detail.startswith("a needs ")) == ("failed", True)


def test_a_model_that_does_not_load_is_a_finding_and_no_success() -> None:
    ran = semantic("doctor", "--json", "--model", "./nowhere")
    assert ran.code == 1
    assert verdicts(ran.out)["embedded model"] == "ok"
    assert verdicts(ran.out)["model"] == "failed"


def test_without_mlx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_mlx(
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> object:
        if name == "semantic.adapters.mlx.model.provider":
            raise ImportError("libmlx.so: no such file")
        return real(name, globals, locals, fromlist or (), level)

    monkeypatch.setattr(builtins, "__import__", no_mlx)
    ran = semantic("doctor", "--json")
    assert ran.code == 1
    assert verdicts(ran.out)["device"] == "failed"
    ran = semantic("run", "Hello!")
    assert ran.code == 4
    assert ran.err.count("\n") == 1
    assert "install 'semantic-engine[cpu]'" in ran.err or sys.platform != "linux"


def test_the_supported_versions_are_those_that_are_installed_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package, (first, below) in SUPPORTED.items():
        wanted = f"{package}>={'.'.join(map(str, first))},<{'.'.join(map(str, below))}"
        assert wanted in project["dependencies"]


@pytest.mark.parametrize(
    ("installed", "verdict"),
    [("0.32.4", "ok"), ("0.32.9.dev1", "ok"), ("0.32.3", "warning"), ("0.33.0", "warning")],
)
def test_another_version_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, installed: str, verdict: str
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    assert check_version("mlx").verdict == verdict


def test_a_missing_package_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUPPORTED, "no-such-package", ((1,), (2,)))
    finding = check_version("no-such-package")
    assert (finding.verdict, finding.advice) == ("failed", "install no-such-package>=1,<2")


@pytest.mark.parametrize(
    ("status", "verdict", "advice"),
    [
        ("openblas", "ok", ""),
        ("not needed", "ok", ""),
        ("missing", "warning", "libopenblas0-pthread.* up to 20 times slower"),
        ("too late", "warning", "import semantic.adapters.mlx before mlx"),
    ],
)
def test_a_slow_blas_is_a_warning_with_advice(
    monkeypatch: pytest.MonkeyPatch, status: str, verdict: str, advice: str
) -> None:
    monkeypatch.setattr(doctor, "blas_status", lambda: status)
    finding = check_blas()
    assert finding.verdict == verdict
    assert re.search(advice, finding.advice)


def test_the_layers_that_keep_mlx_lms_caches_are_named() -> None:
    assert doctor._ragged([True, True]) == "all 2 layers"
    assert doctor._ragged([False]) == "none of 1 layers; all use mlx-lm's own caches"
    assert doctor._ragged([True, False, False]).endswith("caches for layers 1, 2")


# The form of caches


def test_the_form_of_the_caches_is_told() -> None:
    ragged = wrap_model(tiny_model("llama"), attention=None, pads=lambda _: None)
    padded = wrap_model(tiny_model("llama"), attention=None, pads=lambda _: even)
    assert doctor.check_caches(tiny_backend("llama in pages")).detail == "in pages"
    assert doctor.check_caches(tiny_backend("adds to keys")).detail == "padded by mlx-lm"
    assert doctor.check_caches(ragged).detail == "one by one (ragged)"
    assert doctor.check_caches(padded).detail == "padded once a batch is stable"
    alone = doctor.check_caches(wrap_model(unusual_model("gpt_bigcode")))
    assert alone.verdict == "warning"
    assert "one sequence after another" in alone.detail


# The budget


@pytest.mark.parametrize(
    ("memory", "weights", "expected"),
    [
        (16 * GIB, GIB, 4 * GIB),
        (16 * GIB, 11 * GIB, planned_bytes(16 * GIB) - 12 * GIB),
        (GIB, 2 * GIB, 64 << 20),
    ],
)
def test_the_pool_gets_a_quarter_at_most_what_is_left_and_never_nothing(
    memory: int, weights: int, expected: int
) -> None:
    assert default_pool_bytes(memory, weights) == expected


@pytest.mark.parametrize("weights", [0, GIB // 2, 9 * GIB])
@pytest.mark.parametrize("free", [GIB, 8 * GIB, 16 * GIB])
def test_weights_pool_and_tier_are_within_what_the_process_may_have(
    free: int, weights: int
) -> None:
    found = device.Device("CPU", "test", 16 * GIB, used_bytes=0, free_bytes=free)
    memory = default_process_bytes(found, weights)
    assert free * 9 // 10 <= memory <= 16 * GIB
    parts = weights + default_pool_bytes(memory, weights) + default_memory_tier_bytes(memory)
    assert parts <= planned_bytes(memory)


def test_a_model_that_does_not_fit_is_refused_with_figures_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    folder = small_model(tmp_path / "model")
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with pytest.raises(CapacityError, match=r"the weights of .*model must fit in .* GiB, got"):
        promised(Settings(str(folder), process_bytes=weights))
    given = promised(Settings(str(folder), process_bytes=2 * weights + GIB))
    assert given.process_bytes == 2 * weights + GIB
    chosen = promised(Settings(str(folder))).process_bytes
    assert chosen is not None
    assert chosen <= device.read_device().memory_bytes


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_is_said_to_fit_fits_and_no_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LENGTHS", (512,))
    backend = wrap_model(tiny_model(kind), "tiny")
    spec = backend.cache_spec()
    pool: BlockPool = BlockPool(spec, max_bytes=spec.bytes_for(5 * 512) + 99)
    said = doctor.check_fit(pool, backend).detail
    found = re.match(r"contexts of up to (\d+) tokens; in the pool (\d+) agents of 512", said)
    assert found is not None, said
    longest, agents = map(int, found.groups())
    engine = BlockPoolBatchEngine(backend, CharTokenizer(), pool, spec)
    for n in range(agents + 1):
        engine.submit(f"agent-{n}", [(n + i * i) % VOCAB for i in range(510)], max_tokens=2)
        for done in engine.step():
            assert done.error is None
        assert len(engine.idle_caches.lru_order()) == min(n + 1, agents)
    with pytest.raises(PoolExhaustedError):
        engine.submit("long", [1] * longest, max_tokens=1)
    engine.submit("long", [1] * (longest - 1), max_tokens=1)
    assert [done.error for done in engine.step()] == [None]


def test_a_limit_that_was_given_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_shares, "read_device", lambda: pytest.fail("it was not asked for"))
    assert (
        assemble(Settings(pool_blocks=9, memory_bytes=1 << 20), FakeProvider()).pool.max_bytes
        is None
    )
    assert (
        assemble(Settings(pool_bytes=99, memory_bytes=1 << 20), FakeProvider()).pool.max_bytes == 99
    )


def test_without_a_limit_the_device_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = device.Device("CPU", "test", memory_bytes=9 * GIB, used_bytes=GIB, free_bytes=8 * GIB)
    monkeypatch.setattr(memory_shares, "read_device", lambda: found)
    pool = assemble(Settings(memory_bytes=1 << 20), FakeProvider()).pool
    assert pool.max_bytes == 8 * GIB * 9 // 10 // 4


def test_the_device_says_what_it_is() -> None:
    found = device.read_device()
    assert found.kind in {"CPU", "Metal", "CUDA"}
    assert 0 < found.free_bytes <= found.memory_bytes


def test_blocks_of_other_chips_are_warned_of() -> None:
    [own, any_chip] = [
        doctor.check_identity(Settings(any_chip=any_chip)) for any_chip in (False, True)
    ]
    assert (own.verdict, any_chip.verdict) == ("ok", "warning")
    assert own.detail in any_chip.detail
    assert own.detail.endswith("secret: the store's own")


def test_it_says_whether_a_batch_is_exact() -> None:
    found = doctor.check_lane(Lane())
    assert (found.verdict, found.detail) == ("ok", "yes: an answer has the same bits in all steps")
    assert doctor.check_lane(Lane(2, 64)).detail.endswith("in all steps of at least 2 rows")
    loose = doctor.check_lane(Lane(1, 16, splits=False))
    assert loose.detail.endswith("in all steps of at most 16 rows")
    found = doctor.check_lane(Lane(problem="--exact-batch is off"))
    assert (found.verdict, found.detail) == ("ok", "no: --exact-batch is off")


def test_it_says_whether_steps_check_drafts() -> None:
    settings = Settings()
    assert doctor.check_drafts("", settings).detail.startswith("yes: ")
    assert doctor.check_drafts("no pages", settings).detail == "no: no pages"
    assert doctor.check_drafts("", replace(settings, drafts="off")).detail == "no: --drafts is off"


def test_rows_of_each_kind_of_layer() -> None:
    options = ModelsOptions(no_store=True)
    found = list(doctor.check_models(doctor._served(options, ()), rows=True))
    lines = [one.detail for one in found if one.name == "rows"]
    assert any(re.fullmatch(r"RMSNorm 256 float32: [-0-9; ]+", line) for line in lines)
    assert any(re.fullmatch(r"Linear 576 x 256 float32: 1[-0-9; ]+", line) for line in lines)


def test_numbers_in_a_row_are_a_range() -> None:
    assert doctor._ranges((1, 2, 3, 5, 8, 9)) == "1-3 5 8-9"
