"""Request fields that all APIs share, and tools that clients run."""
