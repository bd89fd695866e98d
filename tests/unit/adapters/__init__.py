"""Adapters alone, with fakes around them."""
