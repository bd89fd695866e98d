"""The library: engines and agents as objects, over the same application as the server."""
