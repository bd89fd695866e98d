"""OpenAI's wires: chat completions, completions and responses."""

from semantic_server.http.openai.routes import router

__all__ = ["router"]
