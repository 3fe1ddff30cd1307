"""Caches the activations of a model's frozen lower part, one run per data set. Public as `pk.loops.CachedPrefix`."""

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.files.digests import array_digest
from prunekit.anatomy.layers.model_weights import places
from prunekit.core.runtime import backend, compilation
from prunekit.core.runtime.arguments import examples_in, require_positive
from prunekit.training_tools.loops.activation_cache import Batches, FileStore, Kept, MemoryStore
from prunekit.training_tools.loops.graph_split import MaskedActivations, cut, obstacles

# Tolerances well above the rounding differences between kernels, and well below the effect of training mode.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4
_PROBED = 8


class CachedPrefix:
    """Splits a model at its frozen lower part, and caches that part's activations, computed once per data set.

    `upper` is a model from these activations to the outputs. It shares its layers with the whole model, so training or
    pruning `upper` changes the whole model's weights. Cached activations are looked up by a hash of the data, weights,
    layer configurations, batch size and versions, so changed weights or data never hit the cache. The hash excludes
    source code: after changing the code of a custom layer, use another directory. Results equal those of the whole
    model except for the last bits; see `activations`.

    Args:
        model: A built Sequential or functional model; its weights, layers and settings are not changed.
        boundary: Layers at whose outputs the model is cut: a layer's name or path, ("shared", 1) for the second call
            of a layer, or a list of these. None finds the deepest cut with a frozen lower part: no trainable weight,
            no dropout, noise or augmentation, no unfrozen BatchNormalization, no activity regularizer.
        directory: Folder of the cached activations, shared between processes and read as memory maps. None caches the
            activations in memory.
        limit: Maximum size of the cached activations in bytes; the least recently used data set is evicted first.
        batch_size: Batch size of the lower part; use the training's batch size for bit-identical results.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: `model` is not a Keras 3 model; `boundary` is not a name, a pair (name, call) or a list of these.
        ValueError: The model is not built, or has no graph (a subclass with its own `call`); no layer is frozen, or
            all are; a layer below the boundary has trainable weights, draws random numbers or differs in training mode;
            no layer has the given name; the activations are float64 and `floatx`, to which `fit` casts, is not.
    """

    def __init__(
        self,
        model: Any,
        boundary: Any = None,
        *,
        directory: str | os.PathLike[str] | None = None,
        limit: int = 1 << 30,
        batch_size: int = 128,
    ):
        backend.require_tensorflow("CachedPrefix")
        require_positive(limit=limit, batch_size=batch_size)
        parts = cut(model, boundary)
        self.model = model
        self.lower = parts.lower
        self.upper = parts.upper
        self.boundary = parts.names
        self.batch_size = batch_size
        self.computed = 0
        self._stores: list[Any] = [MemoryStore(limit)]
        if directory is not None:
            self._stores.insert(0, FileStore(directory, limit))
        self._compiled: tuple[str, Any] = ("", None)
        self._unnamed = secrets.token_hex(8)
        self._refuse_wider_than_floatx()

    def activations(self, x: Any, *, key: str | None = None) -> Any:
        """Returns the activations at the boundary for `x`, from the cache if they were computed before.

        On a CPU, activations equal those inside the whole model bit for bit if the batches and their order are equal.
        In another order the last bits may differ, also within the whole model: kernels compute the last elements of a
        batch one at a time, and some functions (tanh, float64 products) then round differently, as in a batch of one.

        Args:
            x: Inputs: an array of shape (examples, ...) or a structure of arrays; or a `tf.data.Dataset` of batches
                (x), (x, y) or (x, y, sample_weight), which is iterated once and whose order is kept.
            key: Name of the data; required for a dataset. For arrays it replaces the hash of the data, which takes a
                second per two gigabytes. Use a new key when the data change.

        Returns:
            For arrays: a read-only array of shape (examples, ...), or a list of arrays if several tensors (including
            masks) cross the boundary, in the form that `upper` accepts. For a dataset: a dataset with activations in
            place of the inputs, read lazily.

        Raises:
            TypeError: `x` is neither dense arrays nor a dataset; `key` is not a non-empty string.
            ValueError: The arrays have no examples or different lengths; a dataset has no key or is infinite; the
                activations exceed `limit`; a layer below the boundary was unfrozen or differs in training mode; the
                activations have no example axis.
        """
        import tensorflow as tf

        if key is not None and (not isinstance(key, str) or not key):
            raise TypeError(f"`key` is a name for the data, a non-empty string. Received: {key!r}.")
        self._refuse_unfrozen()
        if isinstance(x, tf.data.Dataset):
            return self._of_dataset(x, key)
        x = keras.tree.map_structure(_array, x)
        examples = examples_in(x=x)
        found = self._kept(["arrays", self.batch_size, _data_key(x, key)], lambda: self._runs(x, examples), examples)
        return found.arrays[0] if len(found.arrays) == 1 else list(found.arrays)

    def clear(self) -> None:
        """Frees the activations in memory; files stay."""
        for store in self._stores:
            store.clear()

    # Finding and keeping ----------------------------------------------------------------------------------------------

    def _kept(self, data: list[Any], runs: Any, examples: int | None) -> Kept:
        structure, weights = self._structure(), self._state()
        key = hashlib.sha256(json.dumps([structure, weights, data]).encode()).hexdigest()
        for store in self._stores:
            kept = store.find(key)
            if kept is not None:
                return kept
        if self._compiled[0] != structure:
            # A layer's configuration changed, and the old trace would not reflect the change.
            self._compiled = (structure, compilation.OpenFunction(lambda x: self.lower(x, training=False)))
        self.computed += 1
        for store in self._stores[:-1]:
            try:
                return store.keep(key, runs(), examples)
            except OSError as error:
                warnings.warn(
                    f"The activations cannot be written to disk ({error}), so they are kept in memory.", stacklevel=4
                )
        return self._stores[-1].keep(key, runs(), examples)

    def _structure(self) -> str:
        """Returns a hash of the lower part's configuration (without weights), the versions, `floatx` and the device."""
        import tensorflow as tf

        try:
            config = json.dumps(keras.saving.serialize_keras_object(self.lower), sort_keys=True, default=repr)
        except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
            if len(self._stores) > 1:
                raise ValueError(
                    f"Activations on disk are looked up by the layers' configurations. Received: {error} Give the "
                    "layer a `get_config`, or leave `directory` out."
                ) from error
            config = self._unnamed
        words = [vocabulary() for vocabulary in _vocabularies(self.lower)]
        device = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
        parts = [config, words, keras.__version__, tf.__version__, keras.config.floatx(), device]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    def _state(self) -> list[str]:
        return [array_digest(np.asarray(backend.native(weight).numpy())) for weight in self.lower.weights]

    # Computing --------------------------------------------------------------------------------------------------------

    def _runs(self, x: Any, examples: int) -> Batches:
        for begin in range(0, examples, self.batch_size):
            rows = slice(begin, begin + self.batch_size)
            yield self._run(keras.tree.map_structure(lambda a, rows=rows: a[rows], x), first=not begin)

    def _run(self, x: Any, *, first: bool) -> list[np.ndarray]:
        if first:
            self._check_same_in_training(x)
        outputs = keras.tree.flatten(self._compiled[1](x))
        arrays = [np.asarray(output.numpy()) for output in outputs]
        examples = examples_in(x=x)
        for array, output in zip(arrays, self.lower.outputs, strict=True):
            if array.shape[:1] != (examples,):
                raise ValueError(
                    f"Activations have one row per example. Received: shape {array.shape} for {examples} examples, "
                    f"from {output.name!r}. Name another layer with `boundary`."
                )
        return arrays

    def _check_same_in_training(self, x: Any) -> None:
        """Raises if the lower part differs in training mode; detects custom layers, which `obstacles` cannot check."""
        some = keras.tree.map_structure(lambda leaf: leaf[:_PROBED], x)
        with keras.StatelessScope(collect_losses=True) as scope:
            trained, plain = (keras.tree.flatten(self.lower(some, training=mode)) for mode in (True, False))
        reasons = [
            f"a pass in training changes {weight.path}"
            for weight in self.lower.weights
            if scope.get_current_value(weight) is not None
        ]
        if scope.losses:
            reasons.append("it adds losses")
        if not all(map(_close, trained, plain)):
            reasons.append("its outputs differ in training")
        if reasons:
            raise ValueError(
                "The lower part must compute the same outputs in training and in inference. Received: "
                f"{reasons[0]}. Name a layer further down with `boundary`; it is now {', '.join(self.boundary)}."
            )
        declared = sum(isinstance(place.layer, MaskedActivations) for place in places(self.upper))
        masks = sum(getattr(output, "_keras_mask", None) is not None for output in plain)
        if masks > declared:
            raise ValueError(
                "A mask from inside a nested model crosses the boundary, and would be lost. Received: the boundary "
                f"{', '.join(self.boundary)}. Name a layer further down with `boundary`."
            )

    def _refuse_unfrozen(self) -> None:
        reasons = obstacles(self.lower)
        if reasons:
            raise ValueError(
                f"The lower part must stay frozen. Received: {'; '.join(reasons[:3])}. Freeze it again, "
                "or build a new CachedPrefix."
            )

    def _refuse_wider_than_floatx(self) -> None:
        wide = [tensor.name for tensor in self.lower.outputs if tensor.dtype == "float64"]
        if wide and keras.config.floatx() != "float64":
            raise ValueError(
                f"`fit` and `evaluate` cast arrays to Keras's precision, so float64 activations would lose digits. "
                f"Received: {wide[0]!r} in float64 and keras.config.floatx() == {keras.config.floatx()!r}. Call "
                "keras.config.set_floatx('float64') first."
            )

    # Datasets ---------------------------------------------------------------------------------------------------------

    def _of_dataset(self, dataset: Any, key: str | None) -> Any:
        import tensorflow as tf

        if key is None:
            raise ValueError(
                "The contents of a dataset are unknown before iteration, so it needs a key: activations(dataset, "
                "key='train'). Received: key=None."
            )
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError("Only finite datasets are cached. Received: an infinite dataset. Use `take`.")
        spec = dataset.element_spec
        kept = self._kept(["dataset", key, repr(spec)], lambda: self._runs_over(dataset), None)
        return _as_dataset(kept, len(self.lower.outputs), spec[1:] if isinstance(spec, tuple) else None)

    def _runs_over(self, dataset: Any) -> Batches:
        for number, element in enumerate(dataset):
            x, *others = element if isinstance(element, tuple) else (element,)
            yield [*self._run(x, first=not number), *(np.asarray(leaf) for leaf in keras.tree.flatten(others))]


def _as_dataset(kept: Kept, shown: int, others: Any) -> Any:
    """Returns a dataset of batches (activations, labels, ...), or of activations if the data had inputs only."""
    import tensorflow as tf

    def elements() -> Iterator[Any]:
        begin = 0
        for size in kept.sizes:
            yield pack([array[begin : begin + size] for array in kept.arrays])
            begin += size

    def pack(leaves: list[Any]) -> Any:
        activations = leaves[0] if shown == 1 else tuple(leaves[:shown])
        return activations if others is None else (activations, *keras.tree.pack_sequence_as(others, leaves[shown:]))

    signature = pack([tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in kept.arrays])
    dataset = tf.data.Dataset.from_generator(elements, output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(kept.sizes))).prefetch(tf.data.AUTOTUNE)


def _array(leaf: Any) -> np.ndarray:
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(f"Inputs are dense arrays, or a tf.data.Dataset. Received: {type(leaf)!r}.") from error
    if not array.ndim:
        raise TypeError(f"Inputs are arrays with one row per example, or a tf.data.Dataset. Received: {leaf!r}.")
    return array


def _data_key(x: Any, key: str | None) -> Any:
    leaves = keras.tree.flatten(x)
    if key is not None:
        return ["named", key, [(array.dtype.str, array.shape) for array in leaves]]
    if any(array.dtype.hasobject for array in leaves):
        raise ValueError("Arrays of Python objects have no bytes to hash. Received: dtype object. Give them a `key`.")
    return [array_digest(array) for array in leaves]


def _vocabularies(model: Any) -> Iterator[Any]:
    """Yields functions that return a layer's vocabulary or bin boundaries.

    Weights do not contain these tables, and the configuration contains only the constructor's values.
    """
    for place in places(model):
        if hasattr(place.layer, "get_vocabulary"):
            yield place.layer.get_vocabulary
        elif getattr(place.layer, "bin_boundaries", None) is not None:
            yield lambda layer=place.layer: list(map(float, layer.bin_boundaries))


def _close(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype.kind in "biu":
        return np.array_equal(one, other)
    one, other = one.astype("float64"), other.astype("float64")
    # Finite entries only: with a NaN or infinite tolerance the comparison would be meaningless.
    largest = np.abs(other[np.isfinite(other)]).max(initial=0) or 1
    return np.allclose(one, other, _RELATIVE, _ABSOLUTE * largest, equal_nan=True)
