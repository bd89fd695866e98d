"""Models by name: aliases, the cache of the Hugging Face hub, and the hub itself."""
