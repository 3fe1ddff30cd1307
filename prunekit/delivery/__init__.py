"""Writes the results: exported files, reports, pictures."""
