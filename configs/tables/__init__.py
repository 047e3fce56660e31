"""Results tables for `python -m launch.sweep`."""
