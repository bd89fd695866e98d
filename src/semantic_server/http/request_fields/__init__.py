"""Shared by all APIs: tables of request fields, the field `semantic`, tools that clients run."""
