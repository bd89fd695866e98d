"""Replicas without Ray."""
