"""Mem0, whose memories are found by the vectors of a server, on both of its wires."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.clients import talk

os.environ["MEM0_TELEMETRY"] = "False"  # read when it is imported
from mem0 import Memory  # type: ignore[import-not-found]


@pytest.fixture(params=["ollama", "openai"])
def memory(
    request: pytest.FixtureRequest, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Memory:
    monkeypatch.setenv("MEM0_DIR", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    wire = str(request.param)
    base = {"ollama_base_url": url} if wire == "ollama" else {"openai_base_url": f"{url}/v1"}
    vectors = {"embedding_model_dims": talk.DIMENSIONS, "path": str(tmp_path / "vectors")}
    return Memory.from_config(
        {
            "llm": {"provider": wire, "config": {"model": talk.MODEL, **base}},
            "embedder": {
                "provider": wire,
                "config": {
                    "model": talk.EMBEDDING_MODEL,
                    "embedding_dims": talk.DIMENSIONS,
                    **base,
                },
            },
            "vector_store": {"provider": "qdrant", "config": vectors},
            "history_db_path": str(tmp_path / "history.db"),
        }
    )


def test_a_memory_is_found_by_its_text(memory: Memory) -> None:
    for text in talk.EMBEDDED:
        memory.add(text, user_id="ada", infer=False)
    found = memory.search(talk.EMBEDDED[1], filters={"user_id": "ada"})["results"]
    assert found[0]["memory"] == talk.EMBEDDED[1]
