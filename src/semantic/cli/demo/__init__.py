"""The demonstration: agents in one batch, resumed from their caches, and restored after a kill."""
