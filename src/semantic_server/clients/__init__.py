"""Settings files of other vendors' coding agents, and functions that add this program's server to
these files. Knows no engine; requests only the list of models from a server."""
