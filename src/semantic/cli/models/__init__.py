"""`semantic models`: models by name, the memory they need, and the hub they come from."""
