"""Command-line entry points; the only place that reads flags."""
