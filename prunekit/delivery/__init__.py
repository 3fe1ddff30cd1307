"""What leaves the program: files, pictures, reports.

- `litert`: LiteRT and Keras files, run and timed
- `reports`: records of runs, and their sections
- `packing`: packed files
- `integers`: integer files with our own scales
- `plots`: figures
- `pages`: HTML for browsers and notebooks
"""
