"""The completions wire: /v1/completions."""
