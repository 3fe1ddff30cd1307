"""Pruning: calculates masks, updates them on a schedule, and enforces them during training."""
