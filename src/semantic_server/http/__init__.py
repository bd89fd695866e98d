"""The HTTP server with the APIs of OpenAI, Anthropic and Ollama. Knows no model framework."""
