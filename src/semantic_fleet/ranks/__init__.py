"""Processes that compute one model together: how they start, meet and talk. Imports no
framework.
"""
