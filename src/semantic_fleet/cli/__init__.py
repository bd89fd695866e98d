"""`semantic fleet`: its commands, and the server that each replica is."""
