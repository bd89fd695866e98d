"""OpenAI's APIs: chat completions, completions, embeddings and responses."""

from semantic_server.http.openai import chat, completions, embeddings, responses

ROUTERS = (chat.router, completions.router, responses.router, embeddings.router)

__all__ = ["ROUTERS"]
