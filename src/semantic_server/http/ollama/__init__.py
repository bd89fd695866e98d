"""Ollama's API, for its clients and the programs built on them."""

from __future__ import annotations

from semantic_server.http.ollama import embedding, generation, models

ROUTERS = (generation.router, embedding.router, models.router)

__all__ = ["ROUTERS"]
