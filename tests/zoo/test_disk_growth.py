"""What a conversation leaves on disk grows with what it holds, not with the square of its turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from semantic.bootstrap import App, build_engine
from semantic.composition.engine_settings import Settings
from semantic.domain.value_objects import LayerKind, ModelCacheSpec, whole_blocks
from tests.zoo.folder import write_folder
from tests.zoo.trial import MIB, steady, text

TURNS, NEW, ANSWER = 12, 100, 16
MOST = 1.5
"""Times the bytes of the tokens that the conversation holds."""


def held_bytes(spec: ModelCacheSpec, n_tokens: int) -> float:
    """Of layers that are stored token by token."""
    full = [layer for layer in spec.layers if layer.kind is LayerKind.FULL]
    return sum(layer.bytes_per_block for layer in full) * whole_blocks(n_tokens) / 256


def talk(row: str, folder: Path) -> tuple[App, int]:
    """A conversation of some turns; the engine, and how many tokens it holds."""
    settings = Settings(
        model=str(write_folder(row, folder / "model")),
        pool_bytes=128 * MIB,
        use_disk=True,
        store=folder / "store",
        disk_bytes=512 * MIB,
        memory_bytes=64 * MIB,
    )
    with steady():
        app = build_engine(settings)
    history: tuple[int, ...] = ()
    for turn in range(TURNS):
        prompt = (*history, *text(NEW, f"turn {turn}"))
        app.engine.submit("ann", prompt, max_tokens=ANSWER)
        (done,) = app.engine.step()
        history = (*prompt, *done.tokens)
    app.engine.flush()
    return app, len(history)


@pytest.mark.parametrize(
    "row", ["glm_moe_dsa", pytest.param("deepseek_v32", marks=pytest.mark.thorough)]
)
def test_a_turn_writes_its_new_tokens(row: str, tmp_path: Path) -> None:
    app, n_tokens = talk(row, tmp_path)
    written = sum(file.stat().st_size for file in (tmp_path / "store" / "blocks").rglob("*.*"))
    assert written <= MOST * held_bytes(app.engine.pool.spec, n_tokens)
    app.engine.close()
