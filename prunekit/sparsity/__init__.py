"""Arithmetic on arrays: when, how much, which. Knows no model and no state.

- `arguments`: checks of numbers that users pass
- `shorthands`: names such as "magnitude" and "2:4", and the classes behind them
- `schedules`: step -> sparsity
- `array_ops`: one set of operations for NumPy arrays and tensors
- `selection`: the entries to keep: exact counts, without a full sort
- `sums`: sums that are equal to the bit on every device
- `scores`: criteria: weight -> importance; higher = keep
- `gradient_scores`: criteria from derivatives of the loss
- `channel_scores`: criteria that rank output units
- `patterns`: weights in units that are pruned together: N:M, blocks, channels
- `detection`: the pattern of an array's zeros
- `lamp`: counts by LAMP scores
- `allocation`: one overall sparsity -> one for each weight
- `automatic`: stand-ins for "auto", until model and data are known
- `bounds`: least and greatest sparsities of single weights
- `convex_shares`: shares of removed entries with the least sum of errors
- `sensitivity_table`: reads the damages that a scan measured
- `sensitivity_allocation`: allocation by such a scan
- `reconstruction`: prunes or rounds a matrix while the other weights make up for it
"""
