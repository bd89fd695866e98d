"""OpenAI's wires: chat completions, completions and responses."""

from semantic.adapters.http.openai.routes import router

__all__ = ["router"]
