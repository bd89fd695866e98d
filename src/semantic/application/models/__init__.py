"""Several models in one server: loading and unloading models, and choosing one for a request."""
