"""Recipes: text, schema, run."""
