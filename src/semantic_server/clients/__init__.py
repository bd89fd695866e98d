"""Settings files of other vendors' coding agents, and how to add this program's server to them.
Knows no engine; requests only the list of models from a server."""
