"""Reads folders that `tf.data.Dataset.save` wrote; streamed, shuffled among a buffer of examples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.recipe.datasets.batches import Order
from prunekit.recipe.datasets.fingerprint import fingerprint, fingerprint_notes
from prunekit.recipe.datasets.parts import (
    READ_AT_ONCE,
    Arrays,
    Labels,
    Opened,
    Part,
    flat,
    labels_of,
    require_tensorflow_for,
    subset_digest,
)
from prunekit.recipe.settings.data_source import DataSource
from prunekit.recipe.settings.fields import nearest, shown
from prunekit.recipe.text.loader import RecipeError

_SPEC = "dataset_spec.pb"
LARGEST_SPEC = 1 << 20
_PARTS = {"train": ("train", "training"), "validation": ("validation", "val", "valid"), "test": ("test",)}
# Memory for the examples among which the next one is drawn.
_BUFFER_BYTES = 1 << 28
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, eq=False)
class SavedPart(Part):
    """Examples of a saved data set, which has no access by index.

    Attributes:
        dataset: `tf.data.Dataset` of all stored pairs (inputs, label), in the stored order.
        kept: Which stored examples belong to the part; shape (stored examples,), bool.
        facts: `Labels` of the label, or of each output.
        digest: Fingerprint of the files.
        buffer: Number of examples among which the next one is drawn.
        prepare: Function of a batch of inputs; None leaves the inputs as they are.
    """

    dataset: Any
    kept: np.ndarray
    facts: Any
    digest: str
    buffer: int
    prepare: Callable[[Arrays], Arrays] | None = None

    @property
    def examples(self) -> int:  # type: ignore[override]
        """Number of examples."""
        return int(np.count_nonzero(self.kept))

    def subset(self, indices: np.ndarray) -> "SavedPart":
        """Returns the examples with these indices among those of the part."""
        kept = np.zeros(len(self.kept), bool)
        kept[np.flatnonzero(self.kept)[indices]] = True
        return replace(self, kept=kept)

    def prepared(self, prepare: Callable[[Arrays], Arrays]) -> "SavedPart":
        """Returns the part with other inputs; `prepare` is called for each batch that is drawn."""
        return replace(self, prepare=prepare)

    def in_order(self, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of all batches in the stored order."""
        return self._batched(self._own(), batch_size)

    def shuffled(self, order: Order, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of batches; each iteration takes its seed from `order` at its first batch."""
        import tensorflow as tf

        own = self._own()

        def mixed(_: Any) -> Any:
            seed = tf.ensure_shape(tf.numpy_function(order.epoch_seed, [], tf.int64, stateful=True), [])
            return own.shuffle(self.buffer, seed=seed, reshuffle_each_iteration=False)

        return self._batched(tf.data.Dataset.from_tensors(0).flat_map(mixed), batch_size)

    def labels(self) -> Any:
        """Returns the `Labels` over all stored examples."""
        return self.facts

    def digests(self) -> list[str]:
        """Returns one digest of the files and of the examples that are used."""
        return [subset_digest(self.digest, np.flatnonzero(self.kept))]

    def _own(self) -> Any:
        import tensorflow as tf

        if self.kept.all():
            return self.dataset
        kept = tf.convert_to_tensor(self.kept)
        numbered = self.dataset.enumerate().filter(lambda number, _: tf.gather(kept, number))
        return numbered.map(lambda _, pair: pair)

    def _batched(self, dataset: Any, batch_size: int) -> Any:
        found, prepare = dataset.batch(batch_size), self.prepare
        return found if prepare is None else found.map(lambda inputs, labels: (prepare(inputs), labels))


def open_saved(source: DataSource) -> Opened:
    """Returns the examples of a folder that `tf.data.Dataset.save` wrote, or of its folders train, validation, test.

    Reads all examples once, to count them and to check their labels.

    Raises:
        RecipeError: The folder or a part is missing or damaged, or its elements are not pairs of numbers; or TensorFlow
            is not installed.
    """
    require_tensorflow_for("data.tfds_saved", "save the examples as arrays in an .npz file (data.npz)")
    folder = Path(str(source.tfds_saved))
    if (folder / _SPEC).is_file():
        part, notes = _part(folder, source)
        return Opened(folder.name, part, notes=notes)
    found = {
        part: next((folder / name for name in names if (folder / name / _SPEC).is_file()), None)
        for part, names in _PARTS.items()
    }
    if found["train"] is None:
        raise RecipeError(
            f"{folder} must be a folder that tf.data.Dataset.save wrote, or hold such folders named train, and if "
            f"there are such parts validation and test. Received: a folder without {_SPEC} and train/{_SPEC}."
        )
    parts = {part: _part(path, source) for part, path in found.items() if path is not None}
    chosen = {part: parts[part][0] if part in parts else None for part in _PARTS}
    for name, (part, _) in parts.items():
        if part.dataset.element_spec != parts["train"][0].dataset.element_spec:
            raise RecipeError(f"{folder}: the {name} part must have elements of the same shapes and types as train.")
    notes = tuple(dict.fromkeys(note for _, told in parts.values() for note in told))
    return Opened(folder.name, parts["train"][0], chosen["validation"], chosen["test"], notes=notes)


def _part(folder: Path, source: DataSource) -> tuple[SavedPart, tuple[str, ...]]:
    import tensorflow as tf

    if (folder / _SPEC).stat().st_size > LARGEST_SPEC:
        raise RecipeError(f"{folder / _SPEC} has more than {LARGEST_SPEC:,} bytes, which no data set needs.")
    files = [path for path in folder.rglob("*") if path.is_file()]
    try:
        # One shard after another: the default interleaves as many shards as the machine has cores.
        dataset = tf.data.Dataset.load(
            str(folder), compression=_compression(files), reader_func=lambda shards: shards.flat_map(lambda x: x)
        )
        _check_spec(folder, dataset.element_spec)
        dataset, batched = _unbatched(dataset)
        dataset = _pairs(folder, dataset, source)
        facts, count, size = _scanned(dataset)
    except RecipeError:
        raise
    except Exception as error:
        # Catch every exception: a damaged description fails in protobuf, in TensorFlow's tracing, or in its records.
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecipeError(f"{folder} is not a whole data set of tf.data.Dataset.save: {line}.") from error
    if not count:
        raise RecipeError(f"{folder} must hold at least one example. Received: none.")
    buffer = min(count, source.shuffle_buffer or max(1, _BUFFER_BYTES // max(1, size)))
    notes = ["the elements are batches, and were taken apart"] if batched else []
    if buffer < count:
        notes.append(
            f"each example is drawn among {buffer:,} of {count:,} (shuffle_buffer), since a saved data set has no "
            "access by index"
        )
    part = SavedPart(dataset, np.ones(count, bool), facts, fingerprint(files, folder), buffer)
    told = (f"data: {folder.name}: {'; '.join(notes)}.",) if notes else ()
    return part, (*told, *fingerprint_notes(files))


def _compression(files: list[Path]) -> str | None:
    for path in files:
        if path.suffix == ".snapshot":
            with open(path, "rb") as file:
                return "GZIP" if file.read(2) == _GZIP else None
    return None


# ---- elements --------------------------------------------------------------------------------------------------------


def _check_spec(folder: Path, spec: Any) -> None:
    import tensorflow as tf

    for leaf in tf.nest.flatten(spec):
        if type(leaf) is not tf.TensorSpec or not (
            leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool or leaf.dtype == tf.string
        ):
            raise RecipeError(
                f"{folder}: elements must be dense tensors of numbers or text. Received: {shown(str(leaf))}."
            )


def _unbatched(dataset: Any) -> tuple[Any, bool]:
    """Returns the dataset of single examples, and whether its elements were batches of any length."""
    import tensorflow as tf

    leaves = tf.nest.flatten(dataset.element_spec)
    if all(leaf.shape.rank and leaf.shape[0] is None for leaf in leaves):
        return dataset.unbatch(), True
    return dataset, False


def _pairs(folder: Path, dataset: Any, source: DataSource) -> Any:
    """Returns a dataset of pairs (inputs, labels)."""
    import tensorflow as tf

    spec = dataset.element_spec
    if isinstance(spec, Mapping):
        dataset = dataset.map(_chosen(folder, spec, source))
    elif not (isinstance(spec, tuple) and len(spec) == 2):
        raise RecipeError(
            f"{folder}: elements must be pairs (inputs, label), or mappings of which data.label names the label. "
            f"Received: {type(spec).__name__} of {len(spec) if isinstance(spec, tuple) else 1}."
        )
    elif source.label is not None or source.inputs is not None:
        raise RecipeError(f"{folder}: elements are pairs already: leave out data.label and data.inputs.")
    for kind, part in zip(("inputs", "labels"), dataset.element_spec, strict=True):
        if not isinstance(part, tf.TensorSpec) and not (
            isinstance(part, Mapping) and all(isinstance(leaf, tf.TensorSpec) for leaf in part.values())
        ):
            raise RecipeError(f"{folder}: {kind} must be one tensor, or a mapping from names to tensors.")
        for leaf in flat(part):
            if leaf.dtype == tf.string and kind == "labels":
                raise RecipeError(f"{folder}: labels must be numbers. Received: text.")
            if leaf.dtype == tf.string and source.preprocessing is None:
                raise RecipeError(
                    f"{folder}: inputs must be numbers. Received: text. Choose other keys with data.inputs, or give a "
                    "layer that reads text: preprocessing: [TextVectorization]."
                )
    return dataset


def _chosen(folder: Path, spec: Mapping[str, Any], source: DataSource) -> Callable[[Any], Any]:
    """Returns the function from an element that is a mapping to (inputs, labels)."""

    def keys(value: Any, option: str) -> list[str]:
        names = [value] if isinstance(value, str) else list(value or ())
        for name in names:
            if name not in spec:
                raise RecipeError(
                    f"data.{option}: elements of {folder} have no key {shown(name)}.{nearest(name, spec)}"
                )
        return names

    if source.label is None:
        raise RecipeError(
            f"{folder}: elements are mappings, so data.label must name the label.{nearest('label', spec)}"
        )
    labels = keys(source.label, "label")
    inputs = keys(source.inputs, "inputs") or [name for name in spec if name not in labels]
    if not inputs:
        raise RecipeError(f"{folder}: elements must have a key for the inputs besides {shown(labels[0])}.")

    def pair(element: Any) -> tuple[Any, Any]:
        return (
            element[inputs[0]] if len(inputs) == 1 else {name: element[name] for name in inputs},
            element[labels[0]] if len(labels) == 1 else {name: element[name] for name in labels},
        )

    return pair


def _scanned(dataset: Any) -> tuple[Any, int, int]:
    """Returns the `Labels`, the number of examples, and the bytes of one; reads everything once.

    Raises:
        ValueError: A number is not finite, or examples differ in shape.
    """
    count = size = 0
    found: list[list[Labels]] = []
    structure: Any = None
    for inputs, labels in dataset.batch(READ_AT_ONCE).as_numpy_iterator():
        for array in (*flat(inputs), *flat(labels)):
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"NaN or infinity among examples {count:,} to {count + len(array):,}")
        from_labels = flat(labels)
        size = size or sum(array.nbytes for array in (*flat(inputs), *from_labels)) // len(from_labels[0])
        count += len(from_labels[0])
        found.append([labels_of(array) for array in from_labels])
        structure = labels
    if not count:
        return None, 0, 0
    merged = [_merged(column) for column in zip(*found, strict=True)]
    if isinstance(structure, Mapping):
        return dict(zip(sorted(structure), merged, strict=True)), count, size
    return merged[0], count, size


def _merged(facts: tuple[Labels, ...]) -> Labels:
    low, high = min(item.low for item in facts), max(item.high for item in facts)
    return Labels(facts[0].shape, facts[0].dtype, low, high, all(item.whole for item in facts))
