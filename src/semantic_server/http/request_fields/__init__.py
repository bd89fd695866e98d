"""Shared by all wires: tables of request fields, our own field, tools that clients run."""
