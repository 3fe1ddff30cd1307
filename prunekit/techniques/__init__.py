"""Compression techniques; they do not import one another."""
