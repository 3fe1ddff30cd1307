"""Techniques that make models smaller or faster; strangers to one another."""
