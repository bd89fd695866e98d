"""The wires of OpenAI's clients: chat completions and completions. A wire decides nothing."""

from semantic.adapters.http.openai.routes import router

__all__ = ["router"]
