"""A real server, asked over real connections."""
