"""`semantic fleet`: its commands, and the server inside each replica."""
