"""Trains the mixture that a search chose: on integers, with its zeros, and with the model as its teacher."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from prunekit.anatomy.files.digests import architecture_digest, data_digest, model_digest
from prunekit.core.data.calibration import CheckedData, weighted_batches_of
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.output_metrics import Batches
from prunekit.core.runtime.random_state import kept_random_state
from prunekit.core.runtime.snapshot import DamagedSnapshot, Snapshot, arrays_under, read_snapshot, write_snapshot
from prunekit.delivery.reports.formatting import duration
from prunekit.operations.quantization_callback import QuantizationCallback
from prunekit.operations.quantization_training import QuantizationRun, training_options
from prunekit.searching.judge import SearchData, batched
from prunekit.searching.search_run import Train
from prunekit.searching.time_limit import NO_LIMIT, OutOfTime, TimeLimit
from prunekit.sparsity.arguments import positive, whole
from prunekit.sparsity.array_ops import array_of
from prunekit.suggestions import did_you_mean
from prunekit.techniques.distill.distillation_callback import DistillationCallback
from prunekit.techniques.pruning.training.keep_zeros import KeepZeros
from prunekit.techniques.quantize.options import TrainingKeywords
from prunekit.techniques.quantize.quantization_state import QuantizationState
from prunekit.techniques.shrink.channels.optimizer_state import compile_like, new_optimizer
from prunekit.version import __version__

SETTINGS = ("epochs", "data", "learning_rate", "batch_size")
_RATE, _BATCH = 1e-3, 32
# Fewest examples that a training makes sense with.
_LEAST = 128
# Files of trained mixtures in the folder of a search that has not ended.
_KEPT = "trained-{}.snapshot"
_WEIGHT, _QUANTIZED = "weight/", "quantized/"
# Seconds of training after which the time that all of it takes is known.
_KNOWN = 2.0


class MixtureTraining:
    """A training of mixtures of a model.

    Args:
        model: The model; it is not changed.
        given: Settings, or a function of a model and callbacks; see `pk.search`.
        folder: Where trained models are kept until the search ends; None keeps none.
        identity: What a function does, as values that JSON has; None = its models are not kept.

    Raises:
        TypeError, ValueError: A setting is unknown or wrong; the model is not compiled.
    """

    def __init__(self, model: Any, given: Any, folder: Path | None = None, identity: Any = None):
        self._model, self._folder, self._identity = model, folder, identity
        self._function: Callable[[Any, list[Any]], Any] | None = given if callable(given) else None
        if self._function is not None:
            return
        if not isinstance(given, Mapping):
            raise TypeError(
                "`training` is a mapping such as {'epochs': 3}, or a function of a model and callbacks. Received: "
                f"{given!r}."
            )
        wrong = next((name for name in given if name not in SETTINGS), None)
        if wrong is not None or "epochs" not in given:
            names, hint = ", ".join(map(str, given)) or "nothing", did_you_mean(str(wrong or ""), SETTINGS)
            raise ValueError(f"`training` has epochs, and may have {', '.join(SETTINGS[1:])}. Received: {names}.{hint}")
        self._epochs = whole("training['epochs']", given["epochs"], 1)
        self._rate = float(positive("training['learning_rate']", given.get("learning_rate", _RATE)))
        self._batch = whole("training['batch_size']", given.get("batch_size", _BATCH), 1)
        if not getattr(model, "compiled", False):
            raise ValueError(
                "The loss of a training is the one that the model is compiled with. Received: a model that is not "
                "compiled. Call model.compile(loss=...), or pass a function as `training`."
            )
        self._data = None if given.get("data") is None else _checked(model, given["data"])

    @property
    def needs_examples(self) -> bool:
        """True if examples of the search are trained on."""
        return self._function is None and self._data is None

    def of(
        self,
        examples: SearchData,
        *,
        full_integer: bool = False,
        progress: Progress | None = None,
        limit: TimeLimit = NO_LIMIT,
    ) -> Train:
        """Returns the training as a function of a model and its mixture; see `Train`.

        Args:
            examples: The examples of the search.
            full_integer: True: nothing computes in floating point.
            progress: Told of each epoch: (done, total, text).
            limit: A training that would end later is given up after its first seconds; the function raises OutOfTime.

        Raises:
            ValueError: There are too few examples to train on.
        """
        if self.needs_examples:
            inputs, labels = examples.trained
            count = len(keras.tree.flatten(inputs)[0])
            if count < _LEAST or labels is None:
                has = f"{count} examples that neither choose nor judge" if labels is not None else "no labels"
                raise ValueError(
                    f"A training needs labels, and {_LEAST} examples or more. Received: {has}. Pass training="
                    "{'epochs': ..., 'data': (inputs, labels)}."
                )

        subject = self._subject(examples, full_integer=full_integer)

        def train(model: Any, bits: Any, zeros: Sequence[str], mixture: str) -> QuantizationState:
            options: TrainingKeywords = {"bits": bits, "full_integer": full_integer}
            path = None
            if self._folder is not None and subject is not None:
                told = f"{subject}{mixture}{sorted(zeros)}"
                path = self._folder / _KEPT.format(hashlib.sha256(told.encode()).hexdigest()[:16])
            if path is not None and path.exists():
                run = QuantizationRun(model, batched(examples.fitted), training_options(options))
                if _restore(run, path):
                    state = run.finish().state
                    self._compile_anew(model)
                    return state
            callback = QuantizationCallback(batched(examples.fitted), **options)
            callbacks = [*([KeepZeros(include=list(zeros))] if zeros else []), callback]
            callbacks.append(DistillationCallback(self._model))
            pace = _TrainingPace(limit, progress)
            callbacks.append(pace)
            # What follows draws the same numbers where a training is not made again.
            with kept_random_state(model):
                if self._function is not None:
                    self._function(model, callbacks)
                else:
                    self._fit(model, examples, callbacks)
            if pace.late is not None:
                raise pace.late
            if path is not None:
                _keep(path, model, callback.snapshot())
            self._compile_anew(model)
            return callback.report.state

        return train

    def _compile_anew(self, model: Any) -> None:
        """Compiles a trained model as the one before is, so that one that was kept is not another one."""
        optimizer = new_optimizer(self._model)
        compile_like(self._model, model, optimizer)
        if optimizer is not None:
            # Keras warns where it loads a model whose optimizer was not built.
            optimizer.build(model.trainable_variables)

    def _subject(self, examples: SearchData, *, full_integer: bool) -> str | None:
        """Returns all that the trainings of one search have in common, as a text; None if it cannot be told."""
        given: Any = self._identity
        if self._folder is None:
            return None
        if self._function is None:
            data = examples.trained if self._data is None else self._data
            compiled = dict(self._model.get_compile_config() or {})
            # Its automatic name is another one in each process, and the training has its own.
            compiled.pop("optimizer", None)
            # Reading a data set may change what it returns next.
            if not isinstance(data, tuple) or not compiled:
                return None
            given = [self._epochs, self._rate, self._batch, data_digest(data), compiled]
        if given is None:
            return None
        model = model_digest(self._model), architecture_digest(self._model)
        told = [given, full_integer, data_digest(examples.fitted), *model, keras.__version__, __version__]
        try:
            return json.dumps(told, sort_keys=True)
        except TypeError:
            return None

    def _fit(self, model: Any, examples: SearchData, callbacks: list[Any]) -> None:
        given = examples.trained if self._data is None else self._data
        arguments: dict[str, Any] = {"epochs": self._epochs, "verbose": 0, "callbacks": callbacks}
        if isinstance(given, tuple):
            arguments |= dict(zip(("x", "y", "sample_weight"), given, strict=False), batch_size=self._batch)
            steps: int | None = -(-len(keras.tree.flatten(given[0])[0]) // self._batch)
        else:
            # Keras warns that it does not shuffle data sets.
            arguments |= {"x": given, "shuffle": isinstance(given, keras.utils.PyDataset)}
            steps = _length(given)
        rate: Any = self._rate
        if steps is not None:
            rate = keras.optimizers.schedules.CosineDecay(rate, self._epochs * steps)
        compile_like(self._model, model, keras.optimizers.Adam(rate))
        model.fit(**arguments)


class _TrainingPace(keras.callbacks.Callback):
    """Reports epochs, and ends a training at its begin if there is no time for all of it.

    Attributes:
        late: Why the training was ended; None if it was not.
    """

    def __init__(self, limit: TimeLimit, progress: Progress | None):
        super().__init__()
        self._limit, self._progress = limit, progress
        self.late: OutOfTime | None = None
        # Time and number of steps at the end of the first call, which compiles; steps that are done, and of them those
        # of the epochs before.
        self._first, self._at_first, self._done, self._before, self._is_known = 0.0, 0, 0, 0, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to count."""
        self._at_first, self._done, self._before, self._is_known = 0, 0, 0, False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Estimates the time where the number of steps is known."""
        now, steps = time.monotonic(), self.params.get("steps")
        # With `steps_per_execution`, a call makes several steps; `batch` is the last one.
        done = self._before + batch + 1
        if not self._done:
            self._first, self._at_first = now, done
        self._done = done
        if steps and now - self._first >= _KNOWN:
            self._estimate(steps * self.params["epochs"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reports the epoch, whose number of steps is known now."""
        epochs = self.params["epochs"]
        self._before = self._done
        self._estimate(epochs * self._done // (epoch + 1))
        if self._progress is not None and self.late is None:
            self._progress(epoch + 1, epochs, f"trained epoch {epoch + 1}")

    def _estimate(self, steps: int) -> None:
        """Ends the training, once at most, if the steps that are left take too long."""
        if self._is_known or self._done == self._at_first:
            return
        self._is_known = True
        pace = (time.monotonic() - self._first) / (self._done - self._at_first)
        if pace * (steps - self._done) > self._limit.left:
            whole = pace * steps
            left = duration(self._limit.left)
            told = f"A training takes about {duration(whole)}, and {left} were left: it was given up."
            self.late = OutOfTime(told, whole)
            self.model.stop_training = True


def forget_trained(folder: Path) -> None:
    """Deletes the trained models that searches have kept in a folder."""
    for path in folder.glob(_KEPT.format("*")):
        path.unlink(missing_ok=True)


def _keep(path: Path, model: Any, trained: Snapshot) -> None:
    arrays = {f"{_WEIGHT}{number}": array_of(one) for number, one in enumerate(model.weights)}
    arrays |= {f"{_QUANTIZED}{name}": array for name, array in trained.arrays.items()}
    write_snapshot(path, Snapshot(trained.values, arrays))


def _restore(run: QuantizationRun, path: Path) -> bool:
    """Gives a model what its training had ended with; False if the file is damaged."""
    try:
        found = read_snapshot(path)
        weights = arrays_under(found.arrays, _WEIGHT)
        values = [weights[str(number)] for number in range(len(run.model.weights))]
        before = run.model.get_weights()
        run.model.set_weights(values)
    except (DamagedSnapshot, KeyError, ValueError):
        return False
    try:
        run.work.restore(Snapshot(found.values, arrays_under(found.arrays, _QUANTIZED)))
    except ValueError:
        run.model.set_weights(before)
        return False
    return True


def _checked(model: Any, data: Any) -> Any:
    """Returns training data as `fit` reads them.

    Raises:
        ValueError: They have no labels, do not fit the model, or can be read once only.
    """
    if callable(data) or hasattr(data, "__next__"):
        raise ValueError(
            "The data of a training are read several times. Received: a generator. Pass (inputs, labels), a data set, "
            "or a list of batches."
        )
    checked = CheckedData(model, data)
    next(iter(checked))
    _, labels, _ = next(iter(weighted_batches_of(data)))
    if labels is None:
        raise ValueError("The data of a training have labels. Received: inputs alone. Pass (inputs, labels).")
    return Batches(list(weighted_batches_of(data))) if isinstance(data, list) else data


def _length(data: Any) -> int | None:
    """Returns the number of batches; None if it is not known."""
    try:
        return len(data)
    except TypeError:
        return None
