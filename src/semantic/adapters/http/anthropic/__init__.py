"""Anthropic's messages: what its SDK and the agents built on it speak."""

from __future__ import annotations

from semantic.adapters.http.anthropic.routes import router

__all__ = ["router"]
