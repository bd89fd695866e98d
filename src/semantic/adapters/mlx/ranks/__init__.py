"""One model on several processes, each with a shard of it on its own device."""
