"""What other toolkits wrote: their models, schedules and checkpoints, read into Keras 3."""
