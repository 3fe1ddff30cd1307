"""Which channels go, and what makes up for them.

- `options`: the options of a removal
- `channel_penalties`: penalties on channels in training
- `measured_size`: sizes that are measured, such as bytes and latency
- `budget`: sizes that are calculated
- `repair`: weights fitted to the former outputs
- `selection`: importances, order, how far to go, and channels whose kernels are zero
- `trials`: criterion and allocation by trial, for "auto"
- `verification`: the smaller model beside one with zeros
- `optimizer_state`: compile settings and slots carried over
- `shrink_report`: what shrank, what stayed and why
- `groups_report`: the groups of channels: `pk.channel_groups`
- `shrinking`: selection, new layers, comparison, repair, report

Design

Training before a removal. Techniques do not import one another, so what ranks channels and orders their removal lies
below both: `core/statistics/channel_importance.py`, `anatomy/channels/channel_order.py`,
`anatomy/channels/weight_entries.py`. The policy `techniques/pruning/policies/channel_groups.py` masks a channel in
every weight, biases and moving means included, so that it is zero in training as in inference; `zero_channels` in
`selection` finds such channels by their kernels alone. The two share zeros and no code. Penalties
(`channel_penalties`) are factors applied after each update, through `core/runtime/patching.py`: the proximal operator
of the group lasso makes exact zeros, which a gradient of the penalty would not, and an adaptive optimizer cannot
rescale it. A channel's weights are those that compute it: so groups are disjoint, and the operator is exact.

Measured targets. `measured_size` searches along the order of removal for a measured share, and knows of the measure
only a function of a smaller model (`Measure`) and the calculated size that it follows. The functions for LiteRT files
are in `delivery/litert/model_measures.py`, which techniques cannot import; so `pk.shrink` is in `operations/shrink.py`,
and it and the recipe step pass a `Measure` to `remove_channels`. `delivery/litert/stopwatch.py` runs in a process of
its own, for these targets and for reports. It opens the files again in each turn: two interpreters of one file were
seen to differ by up to 8 % for as long as they lived, which no number of calls averages out.
"""
