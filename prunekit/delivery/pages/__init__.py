"""HTML: one file, no scripts, all user text escaped.

- `pictures`: plots by name
- `markup`: pieces of HTML
- `html_report`: the page of a run
- `notebook`: results in notebooks
"""
