"""Computes many requests in one batch on one thread: scheduling, validation, events."""
