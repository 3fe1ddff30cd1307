"""Trainings of one model side by side, pruned and not, by prunekit and by tensorflow-model-optimization.

Several `fit` calls run in one process, one thread each, but never two at once: a turn is handed from one to the next
every few steps, so that whatever else the machine does hits all of them alike. The parent hands rounds to the processes
of both libraries alternately.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from benchmarks.machine import peak_memory
from benchmarks.models import FINAL_SPARSITY, MODELS

STEPS_PER_EPOCH = 50


# What is trained ------------------------------------------------------------------------------------------------------


class Library:
    """Plain Keras 3 with prunekit's callback."""

    def __init__(self, model: str, smoke: bool):
        import numpy as np

        self.keras = self._import()
        self.build, batch, shape, self.optimizer, width = MODELS[model]
        self.options = {"width": width} if smoke else {}
        self.batch = 4 if smoke else batch
        generator = np.random.default_rng(0)
        self.x = generator.normal(size=(STEPS_PER_EPOCH, self.batch, *shape)).astype("float32")
        self.y = generator.integers(0, 10, (STEPS_PER_EPOCH, self.batch))

    def _import(self):
        import keras

        return keras

    def pruned(self, model, frequency: int, steps: int) -> tuple[Any, list[Any], Callable[[], int]]:
        """(model to fit, callbacks, function that counts mask updates so far)."""
        import prunekit as pk

        callback = pk.PruningCallback(pk.schedules.PolynomialDecay(0.0, FINAL_SPARSITY, 0, steps, frequency=frequency))
        return model, [callback], lambda: len(callback.pruner.events)

    def data(self, steps: int):
        """Returns batches for an epoch of `steps` steps.

        In memory, batched already, nothing prefetched and no autotuning: threads of tf.data that work ahead would do so
        in the next contestant's time, and the end of an autotuned iterator takes anything from nothing to seconds.
        """
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False
        return tf.data.Dataset.from_tensor_slices((self.x[:steps], self.y[:steps])).with_options(options)

    def contestant(self, name: str, frequency: int | None, steps: int, per_turn: int) -> "Contestant":
        """Returns a `fit` of `steps` steps that runs in turns, pruned at this frequency, or not pruned for None."""

        def fit(contestant: Contestant):
            model, callbacks, updates = self.build(self.keras, **self.options), [], lambda: 0
            if frequency is not None:
                model, callbacks, updates = self.pruned(model, frequency, steps)
            kind, arguments = self.optimizer
            loss = self.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(getattr(self.keras.optimizers, kind)(**arguments), loss)

            class Timer(self.keras.callbacks.Callback):
                def on_train_begin(self, logs=None):
                    # The end of the history's event is the end of all callbacks' work, also of that which is done
                    # when all others are through.
                    history = self.model.history
                    former = history.on_train_end

                    def on_train_end(logs=None):
                        former(logs)
                        contestant.ended()

                    history.on_train_end = on_train_end

                def on_train_batch_end(self, batch, logs=None):
                    contestant.step_done(updates())

            contestant.built()
            epochs = -(-steps // STEPS_PER_EPOCH)
            model.fit(self.data(steps // epochs), epochs=epochs, verbose=0, callbacks=[*callbacks, Timer()])

        return Contestant(name, fit, per_turn)


class Tfmot(Library):
    """tf_keras with tensorflow-model-optimization."""

    def _import(self):
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
        import tf_keras

        return tf_keras

    def pruned(self, model, frequency: int, steps: int) -> tuple[Any, list[Any], Callable[[], int]]:
        from tensorflow_model_optimization.sparsity import keras as sparsity

        schedule = sparsity.PolynomialDecay(0.0, FINAL_SPARSITY, 0, steps, frequency=frequency)
        model = sparsity.prune_low_magnitude(model, pruning_schedule=schedule)
        counter = next(layer.pruning_step for layer in model.layers if hasattr(layer, "pruning_step"))
        return model, [sparsity.UpdatePruningStep()], lambda: int(counter) // frequency


class Quantization(Library):
    """Plain Keras 3 with prunekit's quantization in training; the frequency is its `freeze_step`."""

    def pruned(self, model, frequency: int, steps: int) -> tuple[Any, list[Any], Callable[[], int]]:
        import prunekit as pk

        images = self.x[: -(-64 // self.batch)].reshape(-1, *self.x.shape[2:])
        return model, [pk.QuantizationCallback(images, freeze_step=frequency)], lambda: 0


# Taking turns ---------------------------------------------------------------------------------------------------------


class Contestant(threading.Thread):
    """A `fit` in its own thread that runs only in its turns; times are in seconds and exclude waiting."""

    def __init__(self, name: str, fit: Callable[["Contestant"], None], per_turn: int):
        super().__init__(daemon=True)
        self.title = name
        self.fit = fit
        self.per_turn = per_turn
        # (round, seconds, seconds of all processor cores together, whether a mask update was part of it)
        self.steps: list[tuple[int, float, float, bool]] = []
        self.seconds = 0.0  # from the call of fit to the last callback's end
        self.finished = False
        self.error: BaseException | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._updates = 0
        self._round = 0

    def turn(self, number: int) -> None:
        """Lets it run until it has done its steps for this round."""
        if self.finished:
            return
        self._round = number
        self._go.release()
        self._paused.acquire()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """Thread's body."""
        self._go.acquire()
        try:
            self.fit(self)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self.error = error
        self.finished = True
        self._paused.release()

    def built(self) -> None:
        """Called when `fit` begins."""
        self._began = time.perf_counter(), time.process_time()

    def ended(self) -> None:
        """Called when the last callback has seen the end of `fit`."""
        self.seconds += time.perf_counter() - self._began[0]

    def step_done(self, updates: int) -> None:
        """Called by the last callback after each batch; gives the turn away when this round's steps are done."""
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self.steps.append((self._round, wall, cpu, updates != self._updates))
        self._updates = updates
        self.seconds += wall
        if len(self.steps) % self.per_turn == 0:
            self._paused.release()
            self._go.acquire()
        self._began = time.perf_counter(), time.process_time()

    def result(self) -> dict[str, Any]:
        """JSON-ready figures."""
        return {"name": self.title, "seconds": self.seconds, "steps": self.steps}


LIBRARY_CLASSES = {"prunekit": Library, "quantization": Quantization, "tfmot": Tfmot}


def take_turns(
    model: str, smoke: bool, contestants: Sequence[Sequence[Any]], per_turn: int
) -> Generator[int, None, list[Any]]:
    """One round for each item: the contestants that are left after it; returns what all of them measured.

    Args:
        model: A name of MODELS.
        smoke: Whether the model is tiny.
        contestants: (library, title, frequency or None, steps) of each training.
        per_turn: Steps of a turn.
    """
    libraries = {library: LIBRARY_CLASSES[library](model, smoke) for library, *_ in contestants}
    running = [libraries[library].contestant(*row, per_turn) for library, *row in contestants]
    for contestant in running:
        contestant.start()
    number = 0
    while not all(contestant.finished for contestant in running):
        # The first contestant changes from round to round, so that none always runs after the slowest.
        first = number % len(running)
        for contestant in running[first:] + running[:first]:
            contestant.turn(number)
        number += 1
        yield sum(not contestant.finished for contestant in running)
    names = [library for library, *_ in contestants]
    return [{"library": name, **contestant.result()} for name, contestant in zip(names, running, strict=True)]


def memory(library: str, model: str, smoke: bool, contestant: Sequence[Any]) -> dict[str, float]:
    """Peak memory of one `fit` that has the process to itself, and the peak before it, in MiB."""
    training = LIBRARY_CLASSES[library](model, smoke).contestant(*contestant, per_turn=1)
    training.start()
    before, number = 0.0, 0
    while not training.finished:
        before = before or peak_memory()
        training.turn(number)
        number += 1
    return {"before": before, "peak": peak_memory()}
