"""Places that keep blocks: in memory, on disk, and how they are put together."""
