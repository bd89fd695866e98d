"""HTTP server: a served model behind the APIs of OpenAI and Anthropic. Knows no model framework."""
