"""Protocols of the application: the services it offers (inbound) and those it needs (outbound)."""
