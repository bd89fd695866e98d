"""The library: engines and agents as objects, based on the same application as the server."""
