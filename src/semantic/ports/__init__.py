"""Protocols of the application: its offers (inbound) and its needs (outbound)."""
