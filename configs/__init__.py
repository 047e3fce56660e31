"""Experiments as small Python files: one per method, variants by name."""
