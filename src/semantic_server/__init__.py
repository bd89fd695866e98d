"""The server: its HTTP APIs, its web page and its commands. Also sets up clients to use it."""
