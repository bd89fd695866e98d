"""Commands that run a server, or use a running server without loading a model."""
