"""Finding, loading and identifying a model."""
