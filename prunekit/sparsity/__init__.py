"""Arithmetic on arrays: when, how much, which. Knows no model and no state."""
