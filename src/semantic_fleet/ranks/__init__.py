"""Starts and connects the processes that compute one model. Imports no framework."""
