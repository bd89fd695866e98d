"""Prompts that are cached up to their last token, of several agents at once."""

from __future__ import annotations

from semantic import BlockPool, BlockPoolBatchEngine
from semantic.adapters.mlx.kv_cache.paged.attention import PortableAttention
from semantic.adapters.mlx.model.provider import wrap_model
from semantic.domain.value_objects import CompletedGeneration
from tests.support.char_tokenizer import CharTokenizer
from tests.support.tiny_models import VOCAB, tiny_model

AGENTS, TOKENS, NEW = 3, 40, 4


def test_agents_that_ask_the_same_again_at_once_get_the_same_answers() -> None:
    backend = wrap_model(tiny_model("llama"), attention=lambda _: PortableAttention())
    assert backend.in_pages
    spec = backend.cache_spec()
    engine = BlockPoolBatchEngine(backend, CharTokenizer(), BlockPool(spec, 400), spec)

    def asked() -> dict[str, CompletedGeneration]:
        for i in range(AGENTS):
            prompt = [(i * 31 + at * 7) % VOCAB for at in range(TOKENS)]
            engine.submit(f"agent-{i}", prompt, max_tokens=NEW)
        return {done.agent_id: done for done in engine.step()}

    first, again = asked(), asked()
    assert {one.cached_tokens for one in again.values()} == {TOKENS - 1}
    assert {name: one.tokens for name, one in again.items()} == {
        name: one.tokens for name, one in first.items()
    }
    engine.check_integrity()
