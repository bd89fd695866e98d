"""The fleet: stores that replicas share, replicas on Ray, ranks of one model, and commands."""
