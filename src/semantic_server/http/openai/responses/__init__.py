"""The responses API: /v1/responses, including stored responses and their input items."""

from semantic_server.http.openai.responses.routes import router

__all__ = ["router"]
