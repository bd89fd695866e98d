"""Several models in one server: the loaded ones, and the one for a request."""
