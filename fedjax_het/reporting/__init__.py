"""Tables, pictures and reports made from the stored files of runs.

This package runs no experiment and imports no module that does.
"""
