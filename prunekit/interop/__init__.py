"""Reads models, schedules and checkpoints of other toolkits into Keras 3."""
