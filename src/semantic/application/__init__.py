"""The engine and its policies. Imports only the standard library: models and stores are ports."""
