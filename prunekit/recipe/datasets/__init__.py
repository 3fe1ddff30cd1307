"""The data of a run, one file for each kind of source.

- `idx`: the format of MNIST
- `npy`: plain numbers, no pickles
- `batches`: the order of examples
- `parts`: training, validation and test examples; what a source holds
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

Design

`recipe/settings/data_source.py` is the schema of `data`, and `data` loads the data: a function of `recipe/datasets/`
opens the source, the seed splits its examples, and Keras's preprocessing layers prepare the inputs. A new kind of
source is a field of the schema, a module with a function that returns `Opened`, and a row of `_OPEN`.

The result is three `Part`s (`datasets/parts.py`). A part has a number of examples, subsets, batches in the stored
order, and batches in the order of an epoch. `ArrayPart` holds arrays; `ImagePart` and `DiskPart` read the examples of a
batch by their indices. For these, the order of an epoch is one permutation of all examples, which `Order` draws from
the seed and the epoch. A resumed run therefore needs no state of a data pipeline: it begins its epoch at the first
batch. `SavedPart` has no access by index: its buffered shuffle gets a seed of the same origin. Streamed parts train the
same weights, bit for bit, as arrays of the same examples (a test compares them). Keras's own utility lists the images,
but a loader of prunekit decodes them with the same operations, because the utility's shuffle depends on earlier
iterations.
"""
