"""Reads, checks and runs recipes."""
