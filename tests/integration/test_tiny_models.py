"""The models that other tests take as given: what is saved by one process is read by another."""

from __future__ import annotations

import pytest

from semantic.adapters.mlx.kv_cache import probe
from tests.support.durable import EVERY_ARCHITECTURE
from tests.support.in_pages import SUFFIX, tiny_backend
from tests.support.reference import generate
from tests.support.tiny_models import ARCHITECTURES, build, tiny_model


@pytest.mark.parametrize("name", [*EVERY_ARCHITECTURE, "llama bf16"])
def test_weights_do_not_depend_on_what_was_built_before(name: str) -> None:
    first = generate(tiny_model(name), range(1, 40), 8)
    for other in ARCHITECTURES[-2:]:
        build(other)
    assert generate(tiny_model.__wrapped__(name), range(1, 40), 8) == first


@pytest.mark.parametrize("name", ["gemma3", "gemma3" + SUFFIX])
def test_a_model_is_probed_once_however_many_backends_it_gets(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of tests make one: probed each time they would take twice as long."""
    tiny_backend(name)
    for computes in ("_solo", "_batched"):
        monkeypatch.setattr(probe, computes, lambda *_: pytest.fail("probed again"))
    tiny_backend(name)
