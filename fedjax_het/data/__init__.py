"""Data sets, partitions, and the federated data on the device."""
