"""Commands that run a server, or use a running one without loading a model."""
