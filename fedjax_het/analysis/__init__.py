"""What is read off a run afterwards: pictures of partitions and of curves."""
