"""The data of a run, one file for each kind of source.

- `idx`: the format of MNIST
- `npy`: plain numbers, no pickles
- `batches`: the order of examples
- `parts`: training, validation and test examples
- `opened`: what a source holds
- `fingerprint`: fingerprints of files
- `arrays`: npz, npy, idx, factories
- `builtin_files`: files of built-in sets
- `builtin`: digits, diabetes, Fashion-MNIST
- `images`: folders of images
- `disk`: numbers in a memory-mapped file
- `csv_files`: CSV
- `saved`: `tf.data.Dataset.save`
- `preprocessing`: Keras layers before the model
- `data`: opens, splits, prepares
"""
