"""The KV cache of requests: blocks in the pool, idle caches, and prefixes in the store."""
