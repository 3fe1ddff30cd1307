"""What tests need to run on every backend of Keras: a training step in the backend's own loop, and marks."""

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()

tensorflow_only = pytest.mark.skipif(BACKEND != "tensorflow", reason="is about TensorFlow's graphs or gradient tapes")
jax_only = pytest.mark.skipif(BACKEND != "jax", reason="is about JAX's compiled steps")
# TensorFlow's converter copies arrays in a way that NumPy warns of.
converts = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
# JAX takes float64 for float32 unless a process says otherwise before it starts.
PRECISIONS = ["float32"] if BACKEND == "jax" else ["float32", "float64"]


def sync_model_state(model):
    """Has the variables hold what the last step left; inside `fit` on JAX they do not otherwise."""
    getattr(model, "jax_state_sync", lambda: None)()


def zero_counts(model):
    """How many entries of each layer's kernel are zero, in the model's order."""
    return [int((keras.ops.convert_to_numpy(layer.kernel) == 0).sum()) for layer in model.layers]


def as_on_an_accelerator(monkeypatch):
    """Has JAX on a CPU differ from itself as a GPU does, in two respects that tests and users see.

    NumPy reads no memory of an array, so it calls the array's `__array__`; and Keras reads each batch before it trains
    on the one before.
    """
    import jax

    kind = type(jax.numpy.zeros(()))

    def copied(read):
        def copy(given, *args, **kwargs):
            return read(given.__array__() if isinstance(given, kind) else given, *args, **kwargs)

        return copy

    for name in ("array", "asarray"):
        monkeypatch.setattr(np, name, copied(getattr(np, name)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def batches_read_ahead():
    """How many batches Keras reads before `fit` trains on them: on JAX one, unless the device is a CPU (3.15)."""
    if BACKEND != "jax":
        return 0
    import jax

    return int(jax.default_backend() != "cpu")


def training_step(model, optimizer, loss):
    """A function (x, y) -> loss value: one update, compiled where the backend's users compile it.

    On JAX it hands the state to the variables after every step, as a loop that prunes has to.
    """
    return {"tensorflow": _tape_step, "jax": _stateless_step, "torch": _eager_step}[BACKEND](model, optimizer, loss)


def update(optimizer, variables, value_of):
    """One update of the variables by the gradients of `value_of()`, which is returned; not on JAX."""
    if BACKEND == "torch":
        for variable in variables:
            variable.value.grad = None
        value = value_of()
        value.backward()
        optimizer.apply([variable.value.grad for variable in variables], variables)
        return value.detach()
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = value_of()
    optimizer.apply(tape.gradient(value, variables), variables)
    return value


def _tape_step(model, optimizer, loss):
    import tensorflow as tf

    return tf.function(_eager_step(model, optimizer, loss), autograph=False)


def _eager_step(model, optimizer, loss):
    return lambda x, y: update(optimizer, model.trainable_variables, lambda: loss(y, model(x, training=True)))


def _stateless_step(model, optimizer, loss):
    import jax

    if not optimizer.built:
        optimizer.build(model.trainable_variables)

    def value_of(trainable, others, x, y):
        outputs, others = model.stateless_call(trainable, others, x, training=True)
        return loss(y, outputs), others

    @jax.jit
    def compiled(state, x, y):
        trainable, others, own = state
        (value, others), gradients = jax.value_and_grad(value_of, has_aux=True)(trainable, others, x, y)
        trainable, own = optimizer.stateless_apply(own, gradients, trainable)
        return value, (trainable, others, own)

    def step(x, y):
        held = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        value, state = compiled([[variable.value for variable in each] for each in held], x, y)
        for variables, values in zip(held, state, strict=True):
            for variable, new in zip(variables, values, strict=True):
                variable.assign(new)
        return value

    return step


def gradients_of(model, loss, x, y):
    """The gradients of a loss, one per trainable variable."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        return tape.gradient(value, model.trainable_variables)
    if BACKEND == "torch":
        model.zero_grad()
        loss(y, model(x, training=True)).backward()
        return [v.value.grad for v in model.trainable_variables]
    import jax

    others = [v.value for v in model.non_trainable_variables]
    return jax.grad(lambda values: loss(y, model.stateless_call(values, others, x, training=True)[0]))(
        [v.value for v in model.trainable_variables]
    )
