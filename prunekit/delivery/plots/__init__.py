"""Figures by matplotlib.

- `plots`: figures of a run, SVG and PNG
- `channels_plot`: groups of channels
- `plot_labels`: places labels
- `stage_plot`: metric against latency or bytes
- `quantization_plot`: ranges and errors
- `bits_plot`: bytes against errors
- `signal_plot`: a signal report
- `overview_plot`: one run in one figure
- `sweep_plot`: the Pareto front
- `sensitivity_plot`: a heat map
"""
