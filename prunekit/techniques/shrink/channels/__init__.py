"""Which channels go, and what makes up for them.

- `options`: the options of a removal
- `channel_penalties`: penalties on channels in training
- `zero_channels`: channels whose kernels are zero
- `measured_size`: sizes that are measured, such as bytes and latency
- `budget`: sizes that are calculated
- `repair`: weights fitted to the former outputs
- `selection`: importances, order, and how far to go
- `trials`: criterion and allocation by trial, for "auto"
- `verification`: the smaller model beside one with zeros
- `optimizer_state`: compile settings and slots carried over
- `shrink_report`: what shrank, what stayed and why
- `groups_report`: the groups of channels: `pk.channel_groups`
- `shrinking`: selection, new layers, comparison, repair, report
"""
