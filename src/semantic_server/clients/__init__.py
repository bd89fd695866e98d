"""Adds this program's server to the settings files of coding agents."""
