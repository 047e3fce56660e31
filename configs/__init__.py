"""Experiments as Python files: one file per method, with named variants."""
