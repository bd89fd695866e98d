"""Several models in one server: loads and unloads models, and chooses a request's model."""
