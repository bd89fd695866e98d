"""A model that two processes compute over MLX's ring: the same answers, and one store for both."""

from __future__ import annotations

from pathlib import Path

import pytest

from semantic.domain.value_objects import BLOCK_TOKENS
from tests.support.durable import Asked, history, running, text
from tests.support.eight_bits import EIGHT_BITS
from tests.support.in_pages import SUFFIX
from tests.support.lanes import more
from tests.support.two_ranks import pair

pytestmark = pytest.mark.process

FIRST, SECOND = text(2 * BLOCK_TOKENS + 40, 1), text(90, 2)
IN_8_BITS = EIGHT_BITS[0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "llama" + SUFFIX, *more(IN_8_BITS), IN_8_BITS + SUFFIX])
def test_two_ranks_answer_as_one_and_resume_from_one_store(name: str, tmp_path: Path) -> None:
    alike = {"backend": pair().model(name), "columns": 40, "memory_bytes": 4096}
    with running(name, tmp_path, **alike) as life:
        together = [Asked("ada", FIRST), Asked("ben", SECOND), Asked("cy", FIRST[:300])]
        ada, ben, _ = life.ask_all(together, steps_between=1)
        ada_more = (*history(FIRST, ada), *SECOND)
        in_pool = life.ask("ada", ada_more)
        assert in_pool.cached_tokens >= len(FIRST)
        life.engine.evict_idle(1 << 30)
        bodies = life.bodies("ada")
        assert bodies == life.restored_bodies("ada")
    with running(name, tmp_path, **alike) as life:
        from_disk = life.ask("ada", ada_more)
        assert from_disk.cached_tokens >= len(FIRST)
        assert from_disk.tokens == in_pool.tokens
        assert life.ask("ben", SECOND).tokens == ben.tokens
        assert life.bodies("ada").items() >= bodies.items()
