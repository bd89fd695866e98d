"""Protocols of the application: the services it offers (inbound) or needs (outbound)."""
