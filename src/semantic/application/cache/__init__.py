"""The KV cache of requests: blocks of the pool, idle caches, and prefixes in the store."""
