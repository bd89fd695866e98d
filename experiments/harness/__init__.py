"""Shared by all experiments: record of a run, statistics, plots, report and runner."""
