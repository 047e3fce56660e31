"""Comparison with published programs on their own work; see `__main__`."""
