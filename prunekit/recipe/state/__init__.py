"""What the steps of a run work on, and how it survives an interruption.

- `models`: builds or loads the model
- `progress`: tells a listener
- `replica_state`: state of each replica
- `interruption`: Ctrl-C
- `replicas`: replicas of a run
- `compile_settings`: optimizer, losses and metrics
- `run_inputs`: model, data and settings
- `run_state`: what is saved and restored whole
- `directory`: run directories, and their reports
- `checkpoint`: the state at the end of an epoch or step
- `export_samples`: examples that compare files
- `stages`: files that are timed at the end
- `run_log`: notes and progress
- `training`: fits and evaluates
- `workspace`: what steps share: model and masks

Design

Each process computes masks from its own, bit-equal copy of the weights; masks are not communicated.
`core/training/distribution.py` determines the chief process and adds cross-process behaviour that Keras's `fit` lacks;
`replicas` checks the replicas that a recipe requests. All workers run all steps, since they wait for one another; only
the chief writes files.
"""
