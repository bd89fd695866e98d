"""The library: engines and agents as objects."""
