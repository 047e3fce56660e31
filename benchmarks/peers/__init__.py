"""The work that published programs are measured on; see `__main__`."""
