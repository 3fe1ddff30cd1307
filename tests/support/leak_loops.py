"""The training loops of the leak matrix, each with and without prunekit, in the words of the backend at hand."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from backends import BACKEND
from leak_checks import Checker, Leak, Spy, read

from prunekit.operations.quantization_callback import QuantizationCallback
from prunekit.operations.quantization_training import Quantizer
from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.cluster.cluster_callback import ClusterCallback
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

# The update at 8 is the last: 3 does not divide 8. Training goes on for 4 updates; a loss scale may skip some.
SCHEDULE = PolynomialDecay(initial_sparsity=0.3, final_sparsity=0.85, begin_step=0, end_step=8, frequency=3)
UPDATES, BATCH = 12, 4
# Pruned, dense, pruned from step 8 on.
PHASES = ConstantSparsity(0.85, begin_step=0, end_step=8, frequency=4)
# Quantization and clusters begin between two mask updates, and batch normalizations would be frozen after the last.
QUANTIZED, CLUSTERED = "quantized ", "clustered "
CLUSTERS = 4
BEGIN, FREEZE = 2, 10


# ---------------------------------------------------------------- one update, written out


def _with_tape(model, x, y, apply):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = model.optimizer.scale_loss(model.loss(y, model(x, training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    apply(gradients, model.trainable_variables)
    return loss


def _with_backward(model, x, y):
    import torch

    model.zero_grad()
    loss = model.optimizer.scale_loss(model.loss(torch.as_tensor(y), model(x, training=True)))
    loss.backward()
    variables = model.trainable_variables
    with torch.no_grad():
        model.optimizer.apply([variable.value.grad for variable in variables], variables)
    return loss.detach()


def _stateless(model, state, x, y):
    """(loss, new state); a state has the trainable variables, the others and the optimizer's."""
    import jax

    trainable, others, own = state

    def value_of(trainable, others):
        outputs, others = model.stateless_call(trainable, others, x, training=True)
        loss = model.loss(y, outputs)
        with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, own, strict=True))):
            return model.optimizer.scale_loss(loss), (loss, others)

    (_, (loss, others)), gradients = jax.value_and_grad(value_of, has_aux=True)(trainable, others)
    trainable, own = model.optimizer.stateless_apply(own, gradients, trainable)
    return loss, (trainable, others, own)


@keras.saving.register_keras_serializable(package="leak_matrix")
class CustomStep(keras.Model):
    """A functional model with a train_step of its own."""

    if BACKEND == "jax":

        def train_step(self, state, data):
            trainable, others, own, metrics = state
            loss, state = _stateless(self, (trainable, others, own), *data)
            return {"loss": loss}, (*state, metrics)

    elif BACKEND == "torch":

        def train_step(self, data):
            return {"loss": _with_backward(self, *data)}

    else:

        def train_step(self, data):
            return {"loss": _with_tape(self, *data, self.optimizer.apply)}


# ---------------------------------------------------------------- the loops: each with and without prunekit


def _batches(data) -> Iterator[tuple[list[np.ndarray], np.ndarray]]:
    (image, words), labels = data
    for i in range(0, len(labels), BATCH):
        yield [image[i : i + BATCH], words[i : i + BATCH]], labels[i : i + BATCH]


def _fit(model, data, cell, checker: Checker | None) -> None:
    callbacks: list[Any] = []
    if checker:
        pruning = PruningCallback(cell.schedule, **cell.options(data))
        # On JAX, looking has `fit` hand its state back; in a second fit it keeps it for some steps.
        every = 3 if BACKEND == "jax" and cell.loop == "fit after fit" else 1
        callbacks = [Spy(checker, pruning, every, last=False), pruning, Spy(checker, pruning, every, last=True)]
        if cell.loop.startswith(QUANTIZED):
            # Rounding makes zeros of small weights at the end.
            checker.rounds = True
            callbacks.insert(1, QuantizationCallback(data, bits=4, begin_step=BEGIN, freeze_step=FREEZE))
        if cell.loop.startswith(CLUSTERED):
            callbacks.insert(1, ClusterCallback(CLUSTERS, begin_step=BEGIN))
    # Two epochs, so that something happens between them.
    half = [array[: len(array) // 2] for array in (*data[0], data[1])]
    former = model.train_function
    model.fit(half[:2], half[2], batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    if checker:
        checker.both(pruning.pruner, "after fit")
        if cell.loop.startswith(CLUSTERED) and len(np.unique(read(checker.weights["hidden"]))) > CLUSTERS + 1:
            raise Leak(f"hidden has more than {CLUSTERS} values and 0")
    if former is not None and model.train_function is not former:
        raise Leak("the model's train function is not the one it had")


def _fit_after_fit(model, data, cell, checker: Checker | None) -> None:
    first = [array[: 3 * BATCH] for array in (*data[0], data[1])]
    model.fit(first[:2], first[2], batch_size=BATCH, shuffle=False, verbose=0)
    _fit(model, data, cell, checker)
    if checker:
        model.fit(first[:2], first[2], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        if not np.count_nonzero(read(checker.weights["hidden"])[checker.zeros["hidden"]]):
            raise Leak("a plain fit after the pruning still holds the zeros")
        checker.zeros.clear()
        checker.check("in a plain fit afterwards")


def _in_a_loop(model, data, cell, checker: Checker | None, update: Callable[..., None], size: int = 1) -> None:
    batches = list(_batches(data))
    former = model.train_function
    pruned = Pruner(model, cell.schedule, **cell.options(data)) if checker else contextlib.nullcontext()
    with pruned as pruner, _quantized(model, data, cell, checker):
        if checker:
            checker.both(pruner, "before training")
        for i in range(0, len(batches), size):
            update(batches[i : i + size])
            if checker:
                checker.check(f"after batch {i}, before step()")
                pruner.step()
                checker.both(pruner, f"after batch {i}")
                checker.batches += 1
    model.optimizer.finalize_variable_values(model.trainable_variables)
    if checker:
        checker.both(pruner, "after finish()")
        if model.train_function is not former:
            raise Leak("the model's train function is not the one it had")


def _quantized(model, data, cell, checker: Checker | None) -> contextlib.AbstractContextManager:
    if checker is None or not cell.loop.startswith(QUANTIZED):
        return contextlib.nullcontext()
    checker.rounds = True
    return Quantizer(model, data, bits=4)


def _build_optimizer(model) -> None:
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _train_on_batch(model, data, cell, checker: Checker | None) -> None:
    if BACKEND == "jax" and cell.optimizer == "MultiOptimizer":
        # So that a Pruner knows which of its optimizers each mask is to travel with.
        _build_optimizer(model)
    _in_a_loop(model, data, cell, checker, lambda batches: model.train_on_batch(*batches[0]))


def _tape(model, data, cell, checker: Checker | None) -> None:
    import tensorflow as tf

    def apply(gradients, variables):
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step(batches):
        for x, y in batches:
            _with_tape(model, x, y, apply)

    if cell.variant != "run_eagerly":
        step = tf.function(step, jit_compile=cell.variant == "jit_compile")

    def update(batches):
        step([([tf.constant(part) for part in x], tf.constant(y)) for x, y in batches])

    _in_a_loop(model, data, cell, checker, update, _updates_at_once(cell))


def _stateless_apply(model, data, cell, checker: Checker | None) -> None:
    import jax

    def step(state, batches):
        for x, y in batches:
            _, state = _stateless(model, state, x, y)
        return state

    if cell.variant != "run_eagerly":
        step = jax.jit(step)

    def update(batches):
        held = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
        state = step([[variable.value for variable in each] for each in held], batches)
        for variables, values in zip(held, state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    _build_optimizer(model)
    _in_a_loop(model, data, cell, checker, update, _updates_at_once(cell))


def _backward(model, data, cell, checker: Checker | None) -> None:
    _in_a_loop(model, data, cell, checker, lambda batches: _with_backward(model, *batches[0]))


def _updates_at_once(cell) -> int:
    return 3 if cell.variant == "3 steps per execution" else 1


# The fifth is a loop of the user's own.
OWN_LOOP, _own_loop = {
    "tensorflow": ("tape", _tape),
    "jax": ("stateless_apply", _stateless_apply),
    "torch": ("backward", _backward),
}[BACKEND]
RUN: dict[str, Callable[..., None]] = {
    "fit": _fit,
    "fit after fit": _fit_after_fit,
    "train_on_batch": _train_on_batch,
    "custom train_step": _fit,
    OWN_LOOP: _own_loop,
    f"{QUANTIZED}fit": _fit,
    f"{QUANTIZED}{OWN_LOOP}": _own_loop,
    f"{CLUSTERED}fit": _fit,
}
