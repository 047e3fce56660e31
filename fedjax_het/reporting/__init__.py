"""Reporting: from what runs have stored to tables, pictures and reports.

Nothing here runs anything, or imports what does.
"""
