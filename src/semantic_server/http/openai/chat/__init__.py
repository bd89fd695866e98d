"""The chat completions wire: /v1/chat/completions."""
