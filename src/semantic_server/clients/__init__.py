"""Settings files of other makers' coding agents, and how to enter a server of ours into them.

Knows no engine; requests only the list of models from a server.
"""
