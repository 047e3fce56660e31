"""Runs any algorithm: local loops, client mapping, rounds, evaluation."""
