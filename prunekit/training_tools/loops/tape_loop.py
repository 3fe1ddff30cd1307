"""Compiled training step on tf.GradientTape, with a small `fit` around it."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import backend, compilation, patching
from prunekit.core.runtime.arguments import examples_in, require_positive
from prunekit.core.runtime.losses import as_loss, leaves_up_to
from prunekit.core.runtime.optimizers import updates_in
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner, check_loop_steps_after_updates


class TapeLoop:
    """Compiled training loop on tf.GradientTape: forward pass, loss, gradients, update, pruning.

    On one CPU, the resulting weights equal those of `model.compile` and `model.fit` with a `PruningCallback` bit for
    bit, given the same seed, data order and options. The model need not be compiled, and TapeLoop does not compile it.

    Args:
        model: A built Keras model.
        optimizer: A Keras optimizer, or its name.
        loss: A Keras loss, its name, or a function (y_true, y_pred) -> one loss per example; for several outputs a list
            or dictionary of these, shaped like the outputs. Losses that layers add (regularizers) are added to it.
        pruner: A `Pruner` of this model and this optimizer; `pruner.step()` is called after each update.
        metrics: A list of Keras metrics or their full names, such as "sparse_categorical_accuracy"; the model then has
            one output.
        jit_compile: Whether XLA compiles the step.

    Raises:
        RuntimeError: Keras does not run on TensorFlow; a distribution strategy of several replicas is in scope.
        TypeError: `model` is not a Keras 3 model, `pruner` is not a `Pruner`, or `metrics` is not a list.
        ValueError: The model is not built; the pruner belongs to another model or optimizer; a metric has a short name
            ("accuracy", "acc", "crossentropy", "ce"), which is ambiguous.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Any,
        pruner: Pruner | None = None,
        *,
        metrics: Sequence[Any] = (),
        jit_compile: bool = False,
    ):
        backend.require_tensorflow("TapeLoop")
        backend.require_one_replica("TapeLoop", "Use model.fit with PruningCallback there.")
        check_built(model)
        self.model = model
        self.optimizer = keras.optimizers.get(optimizer)
        self.pruner = pruner
        if pruner is not None:
            _check_pruner(pruner, self.model, self.optimizer)
        if not self.optimizer.built:
            # Creating slots while the step is traced would cause a second trace.
            self.optimizer.build(model.trainable_variables)
        self._losses = keras.tree.map_structure(as_loss, loss)
        self._tracker = keras.metrics.Mean("loss")
        self.metrics = [self._tracker, *map(_metric, _several(metrics))]
        self._train = compilation.OpenFunction(self._update, xla=jit_compile)
        self._test = compilation.OpenFunction(self._measure, xla=jit_compile)

    def step(self, x: Any, y: Any, sample_weight: Any = None) -> dict[str, float]:
        """Runs one update on one batch, then calls `pruner.step()`.

        Args:
            x: Inputs of shape (batch, ...), or a structure of arrays.
            y: Targets of the loss, shape (batch, ...).
            sample_weight: One weight per example, or None.

        Returns:
            The loss of this batch (including the layers' added losses) and its metrics.
        """
        self._reset()
        results = self._train(*_tensors((x, y, sample_weight)))
        if self.pruner is not None:
            self.pruner.step()
        return _floats(results)

    def evaluate(self, x: Any, y: Any = None, batch_size: int = 32, *, sample_weight: Any = None) -> dict[str, float]:
        """Returns loss and metrics over arrays or a `tf.data.Dataset` of (x, y) or (x, y, sample_weight) batches."""
        self._reset()
        results: dict[str, Any] = {}
        for batch in _Data(x, y, sample_weight, batch_size).batches():
            results = self._test(*batch)
        return _floats(results)

    def fit(  # noqa: PLR0913 (these are the arguments of Keras's own)
        self,
        x: Any,
        y: Any = None,
        epochs: int = 1,
        batch_size: int = 32,
        *,
        sample_weight: Any = None,
        validation_data: Any = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        shuffle: bool = True,
        seed: int | None = None,
        verbose: int = 0,
    ) -> keras.callbacks.History:
        """Trains for `epochs` epochs; returns the Keras `History`, with one value per epoch and metric.

        Args:
            x: Arrays of shape (examples, ...), or a `tf.data.Dataset` of batches, which is not shuffled here.
            y: Labels, if `x` is arrays.
            epochs: Number of passes over the data.
            batch_size: Examples per update, for arrays; the last batch of an epoch may be smaller.
            sample_weight: One weight per example, for arrays.
            validation_data: (x, y), (x, y, sample_weight) or a dataset, evaluated after each epoch as "val_...".
            callbacks: Keras callbacks other than `PruningCallback`; pass `pruner` to TapeLoop instead.
            shuffle: Whether each epoch visits the examples of arrays in a new random order.
            seed: Seed of the shuffling; None draws it from NumPy's global state, set by keras.utils.set_random_seed.
            verbose: 1 for a progress bar, 2 for a line per epoch.

        Raises:
            TypeError: `callbacks` contains a `PruningCallback`.
            LeakError: As `Pruner.step`.
        """
        if any(isinstance(callback, PruningCallback) for callback in callbacks):
            raise TypeError(
                "PruningCallback works inside model.fit. For a TapeLoop, build a Pruner with the loop's optimizer and "
                "pass it as TapeLoop(..., pruner=pruner). Received: a PruningCallback."
            )
        require_positive(epochs=epochs)
        data = _Data(x, y, sample_weight, batch_size)
        seed = int(np.random.randint(2**31)) if seed is None else seed
        orders = (_order(seed, epoch, data.examples) if shuffle and data.examples else None for epoch in range(epochs))
        # LearningRateScheduler and ReduceLROnPlateau read `model.optimizer`.
        with patching.shadowed(self.model, "optimizer", self.optimizer):
            listed = keras.callbacks.CallbackList(
                list(callbacks), add_history=True, add_progbar=bool(verbose), verbose=verbose, epochs=epochs,
                steps=data.steps, model=self.model,
            )  # fmt: skip
            self._announce(data.steps and epochs * data.steps)
            self.model.stop_training = False
            logs = self._epochs(data, orders, validation_data, batch_size, listed)
            listed.on_train_end(logs)
        if self.pruner is not None:
            _warn(self.pruner.run.end_training())
        return next(one for one in listed.callbacks if isinstance(one, keras.callbacks.History))

    # The compiled step ----------------------------------------------------------------------------------------------

    def _update(self, x, y, sample_weight):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            prediction = self.model(x, training=True)
            loss = self._loss(y, prediction, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        return self._record(loss, y, prediction, sample_weight)

    def _measure(self, x, y, sample_weight):
        prediction = self.model(x, training=False)
        return self._record(self._loss(y, prediction, sample_weight), y, prediction, sample_weight)

    def _loss(self, y, prediction, sample_weight):
        try:
            keras.tree.assert_same_structure(self._losses, prediction)
        except (ValueError, TypeError) as error:
            shapes = keras.tree.map_structure(lambda output: tuple(output.shape), prediction)
            raise ValueError(
                "Losses are shaped like the outputs: one for one output, a list or dictionary for several. Received: "
                f"loss={self._losses!r} for outputs of shape {shapes}."
            ) from error
        parts = zip(*(leaves_up_to(self._losses, each) for each in (self._losses, y, prediction)), strict=True)
        losses = [loss(truth, output, sample_weight) for loss, truth, output in parts]
        return sum([ops.cast(extra, losses[0].dtype) for extra in self.model.losses], sum(losses[1:], losses[0]))

    def _record(self, loss, y, prediction, sample_weight):
        self._tracker.update_state(loss, sample_weight=ops.shape(keras.tree.flatten(prediction)[0])[0])
        for metric in self.metrics[1:]:
            metric.update_state(y, prediction, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}

    def _reset(self) -> None:
        for metric in self.metrics:
            metric.reset_state()

    # Epochs ---------------------------------------------------------------------------------------------------------

    def _epochs(self, data: "_Data", orders: Iterable[Any], validation_data, batch_size: int, listed) -> dict[str, Any]:
        listed.on_train_begin()
        logs: dict[str, Any] = {}
        for epoch, order in enumerate(orders):
            self._reset()
            listed.on_epoch_begin(epoch)
            for number, batch in enumerate(data.batches(order)):
                listed.on_train_batch_begin(number)
                logs = self._train(*batch)
                if self.pruner is not None:
                    self.pruner.step()
                listed.on_train_batch_end(number, logs)
                if self.model.stop_training:
                    break
            logs = _floats(logs)
            if self.pruner is not None:
                logs["sparsity"] = self.pruner.sparsity
            if validation_data is not None:
                parts = validation_data if isinstance(validation_data, tuple) else (validation_data,)
                x, y, weight = (*parts, None, None)[:3]
                held_out = self.evaluate(x, y, batch_size, sample_weight=weight)
                logs.update({f"val_{name}": value for name, value in held_out.items()})
            listed.on_epoch_end(epoch, logs)
            if self.model.stop_training:
                break
        return logs

    def _announce(self, steps: int | None) -> None:
        if self.pruner is not None and steps:
            _warn(self.pruner.run.shortfall(self.pruner.step_count + updates_in(steps, [self.optimizer])))


def _check_pruner(pruner: Any, model: Any, optimizer: Any) -> None:
    if not isinstance(pruner, Pruner):
        raise TypeError(f"`pruner` is a pk.Pruner(model, schedule, optimizer). Received: {pruner!r}.")
    if pruner.model is not model:
        raise ValueError(f"The pruner prunes another model ({pruner.model.name!r}) than this loop trains.")
    check_loop_steps_after_updates(pruner, "TapeLoop")
    if not any(one is optimizer for one in pruner.optimizers):
        raise ValueError(
            "The pruner was built without this loop's optimizer, so pruned weights would not stay zero. Build it with "
            f"the same object: pk.Pruner(model, schedule, optimizer). Received: {optimizer!r}."
        )


def _several(metrics: Any) -> list[Any]:
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise TypeError(f"`metrics` is a list of Keras metrics or their names. Received: {metrics!r}.")
    return list(metrics)


def _metric(metric: Any) -> keras.metrics.Metric:
    # `compile` resolves these names by the shapes of labels and outputs; keras.metrics.get would return the exact-match
    # metric for "accuracy".
    if metric in ("accuracy", "acc", "crossentropy", "ce"):
        kind = "accuracy" if metric in ("accuracy", "acc") else "crossentropy"
        raise ValueError(
            f"A metric has its full name: 'sparse_categorical_{kind}' for labels that are numbers of classes, "
            f"'categorical_{kind}' for one-hot labels, 'binary_{kind}' for one output. Received: {metric!r}."
        )
    return keras.metrics.get(metric)


class _Data:
    """Yields arrays or a dataset as batches of tensors (x, y, sample_weight)."""

    def __init__(self, x: Any, y: Any, sample_weight: Any, batch_size: int):
        import tensorflow as tf

        self._dataset = x if isinstance(x, tf.data.Dataset) else None
        if self._dataset is not None:
            if y is not None or sample_weight is not None:
                raise ValueError("A dataset holds its own labels: leave `y` and `sample_weight` out.")
            length = int(self._dataset.cardinality())
            self.examples, self.steps = None, length if length > 0 else None
            return
        if y is None:
            raise ValueError("Arrays need labels. Received: y=None. Pass y, or a tf.data.Dataset of (x, y) batches.")
        self._arrays = keras.tree.map_structure(_as_fit_takes_it, (x, y, sample_weight))
        require_positive(batch_size=batch_size)
        self.examples = examples_in(x=self._arrays[0], y=self._arrays[1], sample_weight=self._arrays[2])
        self._size = batch_size
        self.steps = -(-self.examples // batch_size)

    def batches(self, order: np.ndarray | None = None) -> Iterator[tuple[Any, Any, Any]]:
        """Yields (x, y, sample_weight) batches; `order` permutes the examples of arrays."""
        if self._dataset is not None:
            for element in self._dataset:
                yield (*element, None)[:3] if isinstance(element, tuple) else (element, None, None)
            return
        for begin in range(0, self.examples or 0, self._size):
            rows = slice(begin, begin + self._size) if order is None else order[begin : begin + self._size]
            yield _tensors(keras.tree.map_structure(lambda a, rows=rows: None if a is None else a[rows], self._arrays))


def _order(seed: int, epoch: int, examples: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(examples)


def _as_fit_takes_it(array: Any) -> Any:
    """Returns a NumPy array, with floating-point numbers cast to `floatx` as `fit` casts them."""
    if array is None:
        return None
    array = np.asarray(array)
    return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _tensors(structure: Any) -> Any:
    import tensorflow as tf

    def one(value):
        return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(_as_fit_takes_it(value))

    return keras.tree.map_structure(one, structure)


def _floats(results: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in results.items()}


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=3)
