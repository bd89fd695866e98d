"""HTTP server: models behind the APIs of OpenAI, Anthropic and Ollama. Knows no model framework."""
