"""Measurements on an accelerator, and what `auto` should choose there."""
