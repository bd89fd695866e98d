"""The commands of `semantic fleet`, and the server that runs inside each replica."""
