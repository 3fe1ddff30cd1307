"""Figures by matplotlib.

- `plots`: figures of a run, SVG and PNG
- `channels_plot`: groups of channels
- `plot_labels`: places labels
- `stage_plot`: metric against latency or bytes, and one run in one figure
- `quantization_plot`: ranges, errors, and bytes against errors
- `signal_plot`: a signal report
- `sweep_plot`: the Pareto front
- `sensitivity_plot`: a heat map
- `sizes_plot`: bytes of a file after each compressor
- `files_plot`: drop against bytes of the files of a search
"""
