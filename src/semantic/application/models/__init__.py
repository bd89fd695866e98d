"""Loads and unloads the models of a server, and chooses a request's model."""
