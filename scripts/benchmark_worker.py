"""The TensorFlow side of scripts/bench: trains one kind of model with one library, a few steps at a time.

Several `fit` calls run in one process, one thread each, but never two at once: a turn is handed from one to the next
every few steps, so that whatever else the machine does hits all of them alike. The parent process hands rounds to this
one through its standard input (and to the worker of the other library in between), and reads JSON lines back.
"""

import argparse
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

STEPS_PER_EPOCH = 50
FINAL_SPARSITY = 0.9


# What is trained ------------------------------------------------------------------------------------------------------


def perceptron(keras, width: int = 2048):
    """784-width-width-10, ReLU: 5.8 M weights at the full width; its step is bound by memory."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(width, activation="relu", name="hidden_1"),
            layers.Dense(width, activation="relu", name="hidden_2"),
            layers.Dense(10, name="logits"),
        ]
    )


def resnet20(keras, width: int = 16):
    """ResNet-20 for 32x32x3 (He et al. 2015, section 4.2) with batch normalisation and 1x1 convolution shortcuts."""
    layers = keras.layers

    def convolution(x, filters, size, stride, name):
        x = layers.Conv2D(filters, size, strides=stride, padding="same", use_bias=False, name=name)(x)
        return layers.BatchNormalization(name=f"{name}_norm")(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.Activation("relu")(convolution(inputs, width, 3, 1, "stem"))
    for stage in range(3):
        for block in range(3):
            filters, stride, name = width << stage, 2 if stage and not block else 1, f"stage{stage}_block{block}"
            y = layers.Activation("relu")(convolution(x, filters, 3, stride, f"{name}_a"))
            y = convolution(y, filters, 3, 1, f"{name}_b")
            if stride > 1:
                x = convolution(x, filters, 1, stride, f"{name}_shortcut")
            x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x))


# name -> (builder, batch size, shape of one input, optimizer as (class name, arguments), width for a smoke test)
MODELS: dict[str, tuple[Callable, int, tuple[int, ...], tuple[str, dict], int]] = {
    "perceptron": (perceptron, 64, (784,), ("Adam", {"learning_rate": 1e-4}), 32),
    "resnet20": (resnet20, 32, (32, 32, 3), ("SGD", {"learning_rate": 1e-3, "momentum": 0.9}), 2),
}


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
        from prunekit.sparsity.schedules import PolynomialDecay
        from prunekit.techniques.pruning.callbacks import PruningCallback

        callback = PruningCallback(PolynomialDecay(0.0, FINAL_SPARSITY, 0, steps, frequency=frequency))
        return model, [callback], lambda: len(callback.pruner.events)

    def data(self, steps: int):
        """Batches for an epoch of so many steps.

        In memory, batched already, nothing prefetched and no autotuning: threads of tf.data that work ahead would do so
        in the next contestant's time, and the end of an autotuned iterator takes anything from nothing to seconds.
        """
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = False
        return tf.data.Dataset.from_tensor_slices((self.x[:steps], self.y[:steps])).with_options(options)

    def contestant(self, name: str, frequency: int | None, steps: int, per_turn: int) -> "Contestant":
        """A `fit` of so many steps, pruned at this frequency or not at all, that runs in turns."""

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


# Taking turns ---------------------------------------------------------------------------------------------------------


class Contestant(threading.Thread):
    """A `fit` in a thread of its own that runs only while it has the turn; times are those it ran for, in seconds."""

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
        """Called when the model is there and `fit` begins."""
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


def answer(**fields: Any) -> None:
    """One JSON line for the parent."""
    print("@" + json.dumps(fields), flush=True)


def take_turns(contestants: list[Contestant]) -> None:
    """One round for each line that the parent sends, until all are finished."""
    for contestant in contestants:
        contestant.start()
    answer(ready=True)
    number = 0
    for _ in sys.stdin:
        # Another one goes first each time, so that none is always the one after the most expensive.
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            contestant.turn(number)
        number += 1
        answer(left=sum(not contestant.finished for contestant in contestants))
        if all(contestant.finished for contestant in contestants):
            break
    answer(results=[contestant.result() for contestant in contestants])


# Other measurements ---------------------------------------------------------------------------------------------------


def peak_memory() -> float:
    """Most resident memory this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(contestant: Contestant) -> None:
    """Peak memory of one `fit` that has the process to itself."""
    contestant.start()
    before, number = 0.0, 0
    while not contestant.finished:
        before = before or peak_memory()
        contestant.turn(number)
        number += 1
    answer(before=before, peak=peak_memory())


def main() -> None:
    """Does what one argument, a JSON object, says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=json.loads)
    task = parser.parse_args().task
    library = {"prunekit": Library, "tfmot": Tfmot}[task["library"]](task["model"], task["smoke"])
    contestants = [library.contestant(*row, task["per_turn"]) for row in task["contestants"]]
    if task["kind"] == "memory":
        return memory(*contestants)
    return take_turns(contestants)


if __name__ == "__main__":
    main()
