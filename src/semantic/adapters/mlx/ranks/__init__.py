"""One model computed by several processes, each with a shard of it on a device of its own."""
