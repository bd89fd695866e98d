"""A conversation at a terminal or from a pipe."""
