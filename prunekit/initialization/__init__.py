"""Initial weights, and a report of how signals spread through a model."""
