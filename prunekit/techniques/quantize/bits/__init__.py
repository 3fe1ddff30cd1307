"""Bits for each weight.

- `bit_allocation`: the least error under a budget
- `bit_scan`: fewer bits for one weight at a time
- `bit_choice`: the choice, and what was known
- `bit_search`: under a budget, or above a floor of a metric
"""
