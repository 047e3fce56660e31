"""Aggregation of uploads by the server."""
