"""Records of runs, and the sections that terminal and page share.

- `formatting`: figures and names
- `metrics`: metrics, their directions and changes
- `rows`: rows on exports and runtimes
- `advice`: where zeros pay off
- `stages`: speed and size of a run's models
- `run_report`: the record of one run
- `plot_data`: the data of pictures
- `model_sections`: a model's weights and costs
- `report_sections`: a run's sections
- `terminal_report`: sections on the terminal
- `sweeps`: results of a sweep
- `comparison`: finished runs beside each other
- `sensitivity`: results of a scan
"""
