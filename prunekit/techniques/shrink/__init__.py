"""Removal of channels: smaller models with the same inputs and outputs."""
