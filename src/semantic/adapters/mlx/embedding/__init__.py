"""Embedding models: loading, and the vectors of batches of texts."""
