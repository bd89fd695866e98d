"""Several models in one server: which are loaded, and the one that a request is for."""
