"""Reports as plain data, without Keras: reading one must not need it.

- `plain_data`: records as JSON values, and back
- `display`: base class of reports: sections, text, notebooks, JSON values, data frames
- `sections`: title, table, notes and pictures, for terminal, page and JSON
- `tables`: text in columns
- `keras_metrics`: the metrics of Keras, and which way is better
- `damage`: what a change did to metrics and outputs
- `name_patterns`: patterns that select weights and layers by name
- `reports`: reports on weights
"""
