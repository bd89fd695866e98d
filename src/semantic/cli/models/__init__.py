"""`semantic models`: models by name, what they take, and the hub they are from."""
