"""Processes that compute one model: how they start, connect and talk. Imports no framework."""
