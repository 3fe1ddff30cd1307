"""Model files, which are checked before Keras opens them.

- `archives`: members of zip archives
- `keras_hub_files`: classes of KerasHub in files
- `model_files`: loads `.keras` and HDF5 files
- `digests`: digests of arrays, weights and architectures
"""
