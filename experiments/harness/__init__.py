"""What every experiment shares: the record of a run, its statistics, plots, report and runner."""
