"""KV caches with one buffer per sequence and layer. Their batches need no padding."""
