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

Design

`anatomy/records/keras_metrics.py` is the one table of Keras's metrics: class, direction, required arguments. The
recipe's schema reads it without Keras. `recipe/state/compile_settings.py` makes the arguments of `compile` from a
recipe, and names the results as Keras will; the first name is the main metric, and the evaluation before the first step
checks these names. Exported files are measured by a model that returns its inputs, compiled with the same settings:
Keras then chooses and calculates the metrics of the files' outputs as it does for the model.

A result that notebooks show inherits `Displayed` (`anatomy/records/display.py`). The renderer,
`delivery/pages/notebook.py`, is in a lower folder and named there as text. It makes the sections of the page, inside
one element whose style is nested in that element.
"""
