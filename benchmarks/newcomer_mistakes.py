"""`python -m benchmarks.newcomer_mistakes BEFORE`: do messages about models say what to do next?

Types the mistakes that a newcomer makes with a model, with this source tree and with another one,
and counts the messages that name the file at fault and the mend. The hub is out of reach.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import semantic.adapters.mlx  # isort: skip  # noqa: F401  loads OpenBLAS before MLX
from experiments.harness.document import Scalar
from experiments.harness.environment import ROOT
from experiments.harness.record import Run
from experiments.harness.result import Verdict
from tests.support.model_folder import small_model

QUESTION = "How many messages about an unusable model say which file is wrong and what to do?"
WORDS = {
    "a GGUF file": "`semantic models search Coder-7B` finds conversions",
    "a folder with a GGUF file": "`semantic models search Coder-7B` finds conversions",
    "no tokenizer": "has no tokenizer.json; copy it again",
    "a cut config.json": "config.json is not valid JSON",
    "cut weights": "bytes; copy it again",
    "a short name": "the hub did not deliver it",
    "a name with a tag": "did you mean llama3.2?",
}
"""A part of the message that helps, by mistake."""


def prepared(folder: Path) -> dict[str, str]:
    """The model that each mistake names."""
    (folder / "gguf").mkdir()
    gguf = folder / "gguf" / "Coder-7B-Q4_K_M.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    broken = [small_model(folder / name) for name in ("tokenizer", "config", "weights")]
    (broken[0] / "tokenizer.json").unlink()
    (broken[1] / "config.json").write_text('{"a":')
    os.truncate(broken[2] / "model.safetensors", 3000)
    models = (gguf, gguf.parent, *broken, "qwen3-coder", "llama3.2:3b")
    return dict(zip(WORDS, map(str, models), strict=True))


def message(tree: Path, model: str) -> str:
    """The last line that `semantic run` of a source tree prints."""
    command = [sys.executable, "-m", "semantic", "run", "--no-store", "--model", model, "hi"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(  # noqa: S603  this program, on folders of its own
        command, env=environment, cwd=tree, capture_output=True, text=True, check=False
    )
    return (ran.stderr.strip() or "no message").splitlines()[-1]


def main(given: Sequence[str] | None = None) -> int:
    """Type, print, write; 1 when a message of this tree does not help."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the root of another source tree")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args(given)
    started = Run.start("newcomer_mistakes", QUESTION, model="none", parameters={}, seed=0)
    sides = {"before": cast(Path, arguments.before).resolve(), "now": ROOT}
    samples: list[dict[str, Scalar]] = []
    with TemporaryDirectory() as folder:
        for mistake, model in prepared(Path(folder)).items():
            line: dict[str, Scalar] = {"mistake": mistake}
            for side, tree in sides.items():
                said = message(tree, model)
                line |= {side: said.replace(folder, ""), f"{side}_helps": WORDS[mistake] in said}
            samples.append(line)
            print(json.dumps(line), flush=True)
    helping = {side: sum(bool(one[f"{side}_helps"]) for one in samples) for side in sides}
    passed = helping["now"] == len(samples)
    verdict = Verdict("all messages help", len(samples), helping["now"], passed=passed)
    summary = {"mistakes": len(samples), **helping}
    started.finish(samples, summary, verdict).write(arguments.output / "newcomer_mistakes.json")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
