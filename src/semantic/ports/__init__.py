"""Protocols of the application: the services that it offers or needs."""
