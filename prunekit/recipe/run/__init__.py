"""Runs.

- `preparation`: every refusal, before a weight changes
- `plan`: what a run will do
- `execution`: the steps in order
- `build_report`: the report
- `runner`: `compress` and `verify`
"""
