"""The server: APIs over HTTP, the page, clients' settings, and the commands for them."""
