"""The engine: computes many requests in one batch, on one thread."""
