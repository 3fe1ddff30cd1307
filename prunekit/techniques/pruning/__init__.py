"""Pruning: masks, how they are chosen, when they change, and how their zeros are held."""
