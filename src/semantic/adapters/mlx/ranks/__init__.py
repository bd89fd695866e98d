"""One model on several processes, each of which computes a shard on its own device."""
