"""Processes that compute one model: how they start, meet and talk. Imports no framework."""
