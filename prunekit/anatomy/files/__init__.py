"""Model files, which are checked before Keras opens them.

- `archives`: members of zip archives
- `keras_hub_files`: classes of KerasHub in files
- `model_files`: loads `.keras` and HDF5 files
- `digests`: digests of arrays, weights and architectures

Design

`recipe/settings/applications.py` reads names and arguments of `keras.applications` from Keras's source, so that a
recipe is checked without importing Keras.

Each kind of user file is opened in one module: models by `model_files`, archives by `archives`, arrays by
`recipe/datasets/npy.py` and `idx`, images, CSV files and saved data sets by modules of `recipe/datasets/`, reports by
`recipe/state/directory.py`. A test lists these modules, and SECURITY.md states the limits.
"""
