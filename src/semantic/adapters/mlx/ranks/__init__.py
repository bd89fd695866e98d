"""One model on several processes. Each process computes a shard on its own device."""
