"""OpenAI's responses: what is answered, and what is kept of it under an id."""

from semantic.adapters.http.openai.responses.routes import router

__all__ = ["router"]
