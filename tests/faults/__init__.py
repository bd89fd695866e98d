"""What the world does to a store: killed processes, failing systems, damaged and hostile files."""
