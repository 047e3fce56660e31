"""Analysis after a run: plots of partitions and curves, layer similarity."""
