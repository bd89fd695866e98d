"""`semantic serve` as a service of the user: systemd's on Linux, launchd's on macOS.

`host` runs the managers' own commands, `unit_file` writes. Knows no setting of the server.
"""
