"""The benchmark of architectures, on tiny models; and the shapes that it measures at full size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks import gpu_models, shapes
from experiments.harness.document import Json
from semantic.adapters.mlx.kv_cache import probe


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-8b", 8.03),
        ("qwen3-8b", 8.19),
        ("gemma3-12b", 11.77),
        ("gpt-oss-20b", 20.91),
        ("qwen3-30b-a3b, 24 layers", 15.58),
        ("deepseek-v2-lite", 15.71),
        ("latent, deepseek-v2-lite", 15.71),
        ("hybrid, qwen3-next, 12 layers", 20.38),
    ],
)
def test_a_shape_has_as_many_weights_as_its_model(
    monkeypatch: pytest.MonkeyPatch, name: str, billions: float
) -> None:
    monkeypatch.setattr(shapes, "evaluate", lambda _: None)
    model = shapes.MODELS[name]()
    parameters = cast("Callable[[], dict[str, object]]", model.parameters)()
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(parameters))
    sizes = [weight.size for _, weight in weights]
    assert sum(sizes) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.process
def test_each_model_and_batch_gets_a_line_and_the_result_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = probe._solo
    names = ("quantized", "qwen3_next", "deepseek_v3")
    wanted = [word for name in names for word in ("--only", name)]
    gpu_models.main(["--small", *wanted, "--tokens", "5", "--output", str(tmp_path)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [(line["model"], line["batch"]) for line in lines] == [
        (model, batch) for model in names for batch in (2, 3)
    ]
    for line in lines:
        assert line["form"] in {"pages", "ragged"}
        assert line["differences"]
        assert line["ours_ms"] > 0
        assert line["wrap_parts_s"]["solo"] > 0
    written = json.loads((tmp_path / "gpu_models.json").read_text())
    assert written["summary"]["models"] == lines
    assert probe._solo is before


def test_what_is_slower_or_not_in_pages_misses_the_criterion() -> None:
    right: dict[str, Json] = {"model": "a", "batch": 8, "form": "pages", "ratio": 1.1}
    assert gpu_models.judge([right]).passed
    wrong_ones: list[dict[str, Json]] = [
        {**right, "ratio": 0.99},
        {**right, "form": "ragged"},
        {"model": "a", "batch": 8, "refused": "why"},
    ]
    for wrong in wrong_ones:
        assert not gpu_models.judge([right, wrong]).passed
