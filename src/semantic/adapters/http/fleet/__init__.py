"""The HTTP side of a fleet: which replica a request belongs to, and passing it on."""
