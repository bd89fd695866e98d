"""One model on several processes. Each process computes a shard of the model on its own device."""
