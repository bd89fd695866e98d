"""Processes that compute one model: how they are started, meet and talk. Imports no framework."""
