"""Anthropic's Messages API, for its SDK and the agents built on it."""

from __future__ import annotations

from semantic_server.http.anthropic.routes import router

__all__ = ["router"]
