"""One thread that computes many requests in one batch: scheduling, validation, events."""
