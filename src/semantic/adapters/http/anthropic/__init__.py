"""Anthropic's Messages API, for its SDK and the agents built on it."""

from __future__ import annotations

from semantic.adapters.http.anthropic.routes import router

__all__ = ["router"]
