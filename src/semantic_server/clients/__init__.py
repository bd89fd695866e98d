"""Settings files of other makers' coding agents, and how to enter this program's server into them.
Knows no engine; requests only the list of models from a server."""
