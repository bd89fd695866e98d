"""The server: APIs over HTTP, its web page, clients' settings files, and commands for them."""
