"""Bits for each weight.

- `bit_allocation`: the least error under a budget
- `bit_scan`: fewer bits for one weight at a time
- `bit_choice`: the choice, and what was known
- `bit_search`: under a budget, or above a floor of a metric

Design

Bits of each weight. `bit_scan` rounds one weight at a time and measures the change of the outputs, or takes the errors
of an earlier sensitivity scan. `bit_allocation` chooses: a multiple-choice knapsack, solved exactly by lists of
undominated states, cut by the bound of the linear relaxation. Its convex hull is the path along which `bit_search`
looks for a floor of a metric; each choice on the way is quantized and evaluated, so what is returned was seen to hold.
The integer file needs no table of bits: `narrowest_grid` finds on which grid the values of a weight lie.
"""
