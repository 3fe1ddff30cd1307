"""Models, schedules and checkpoints of other toolkits.

- `tfmot`: tensorflow-model-optimization
"""
