"""What the server did in the last minutes, for those who watch it: bounded, in memory, no texts."""
