"""Runs.

- `preparation`: every refusal, before a weight changes
- `plan`: what a run will do
- `execution`: the steps in order
- `build_report`: the report
- `runner`: `compress` and `verify`

Design

All checks that are possible before a weight changes run first: the text of a recipe without TensorFlow
(`recipe/text/loader.py`), then files, shapes, patterns and schedules with the model built (`preparation`), then the
directory. After these checks a run either completes under its own name, or leaves the earlier files and its
checkpoints.

`core/runtime/snapshot.py` writes arrays and values atomically as one file. A run's checkpoint is such a file.
`PruningCallback` writes such a file beside those of `BackupAndRestore`: a copy of Keras's two files with the pruners'
state, put back before Keras reads. The copy is needed because Keras overwrites its weights in place and writes the
epoch number afterwards, so a kill in between would leave the two files inconsistent.

With several processes the chief writes checkpoints. All processes compare the checkpoints that they see and then read
the same one. Some variables differ between replicas (statistics of batch normalization):
`recipe/state/replica_state.py` gathers them into the checkpoint and restores them; otherwise a resumed run would use
the chief's values on every replica.

A report is a list of `Section`s (`anatomy/records/sections.py`): title, table, notes and pictures as plain data, made
once in `delivery/reports/report_sections.py`. The terminal and the page render them, and a step of a recipe adds its
own sections to its entry in `report.json`; no renderer knows a kind of step. A picture is the name of a plot and its
data, which only the page draws. The plain data of reports (`anatomy/records/reports.py`, `delivery/reports/rows.py`)
are in modules apart from the code that computes them, and pictures apart from tables, so that `prunekit report` imports
neither Keras nor matplotlib.
"""
