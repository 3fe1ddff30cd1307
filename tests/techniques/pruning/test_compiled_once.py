"""No work between mask updates: steps are compiled once, and nothing leaves the device."""

import warnings

import keras
import numpy as np
import pytest
from backends import as_on_an_accelerator, jax_only, tensorflow_only, training_step

from prunekit.sparsity.schedules import PolynomialDecay
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

pytestmark = pytest.mark.every_backend
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture
def events():
    """Names of what JAX reports while a test runs."""
    import jax

    seen = []

    def listen(name, *args, **kwargs):
        seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.clear_event_listeners()


class Counting(keras.layers.Layer):
    """Counts its traces in training."""

    traces = 0

    def call(self, x, training=False):
        self.traces += bool(training)
        return x


@pytest.fixture
def counted():
    layers = [keras.layers.Dense(16, "relu", name="hidden"), Counting(), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), LOSS)
    return model, layers[1]


@tensorflow_only
def test_mask_updates_and_further_fits_trace_nothing(counted, samples):
    model, counting = counted
    x, y = (array[:64] for array in samples)
    pruning = PruningCallback(PolynomialDecay(0.1, 0.9, begin_step=0, end_step=15, frequency=1), allocation="uniform")
    traces, reached = [], []
    for epochs in (1, 1, 2):
        # The first two end before the schedule does, and say so.
        with warnings.catch_warnings(action="ignore"):
            model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[pruning])
        traces.append(counting.traces)
        reached.append(len({event.reached for event in pruning.pruner.events}))
    assert reached == [5, 9, 15], "masks changed in each of them"
    # Once for the step: what Keras would create in a first trace exists before.
    assert traces == [1, 1, 1]


COMPILES = "/jax/core/compile/backend_compile_duration"


@jax_only
def test_mask_updates_and_a_second_fit_compile_nothing(counted, samples, events):
    model, counting = counted
    x, y = (array[:64] for array in samples)
    pruning = PruningCallback(PolynomialDecay(0.0, 0.9, 0, 40, frequency=1), allocation="uniform")

    def fit(epochs):
        before = counting.traces, events.count(COMPILES)
        model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[pruning])
        return counting.traces - before[0], events.count(COMPILES) - before[1]

    with pytest.warns(UserWarning, match="lands on sparsity 0.9 at step 40"):
        traces, compiles = fit(2)
    # Once by Keras, to see what the model is made of, and once for the step.
    assert traces <= 2 and compiles > 0
    with pytest.warns(UserWarning, match="lands on sparsity 0.9 at step 40"):
        assert fit(3) == (0, 0)
    assert fit(5) == (0, 0)
    assert len({event.reached for event in pruning.report.events}) > 30
    assert zeros_of(model) == [round(0.9 * 128), round(0.9 * 64)]


def zeros_of(model):
    return [int((model.get_layer(name).kernel.numpy() == 0).sum()) for name in ("hidden", "logits")]


@jax_only
def test_a_loop_of_the_users_is_compiled_once(counted, samples, events):
    model, counting = counted
    x, y = (array[:16] for array in samples)
    step = training_step(model, model.optimizer, LOSS)
    with Pruner(model, PolynomialDecay(0.0, 0.9, 0, 40, frequency=1), allocation="uniform") as pruner:
        counts = []
        for _ in range(42):
            step(x, y)
            pruner.step()
            counts.append((counting.traces, events.count(COMPILES)))
    # The first updates of the masks compile how they are chosen.
    assert counts[3] == counts[-1]
    assert counts[0][0] == counts[-1][0]
    assert zeros_of(model) == [round(0.9 * 128), round(0.9 * 64)]


class HostCopies:
    """Records which of JAX's arrays Python gets to see: (value of `now()`, shape), in the order of time.

    NumPy takes float32 from a CPU through C's buffer protocol, where nobody can watch; bfloat16 it cannot, and asks for
    `_value`, as everything else does that copies to the host. On a GPU NumPy asks for `_value` of every array. One copy
    that passes through two of the watched functions is recorded once.
    """

    def __init__(self, monkeypatch, now):
        import jax

        self.taken, self.now, self._kind, self._inside = [], now, type(jax.numpy.zeros(())), False
        value, item = self._kind._value, self._kind.item
        monkeypatch.setattr(self._kind, "_value", property(self._watched(value.fget)))
        monkeypatch.setattr(self._kind, "item", self._watched(item))
        for name in ("array", "asarray"):
            monkeypatch.setattr(np, name, self._watched(getattr(np, name)))

    def _watched(self, read):
        def watched(given, *args, **kwargs):
            if not isinstance(given, self._kind) or self._inside:
                return read(given, *args, **kwargs)
            self.taken.append((self.now(), given.shape))
            self._inside = True
            try:
                return read(given, *args, **kwargs)
            finally:
                self._inside = False

        return watched


class Batch(keras.callbacks.Callback):
    """Counts the batches that began."""

    count = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1


@jax_only
@pytest.mark.every_backend(cases=2)
@pytest.mark.parametrize("accelerator", [False, True], ids=["this device", "as on an accelerator"])
def test_every_way_to_the_host_is_watched_and_counted_once(monkeypatch, accelerator):
    import jax

    if accelerator:
        as_on_an_accelerator(monkeypatch)
    weights = jax.numpy.arange(6.0, dtype="bfloat16")
    copies = HostCopies(monkeypatch, lambda: None)
    ways = [
        np.array,
        np.asarray,
        np.ascontiguousarray,
        np.negative,
        np.copy,
        jax.device_get,
        keras.ops.convert_to_numpy,
    ]
    for way in [*ways, type(weights).tolist, lambda w: keras.Variable(w).numpy()]:
        copies.taken.clear()
        # One that no other way has copied before.
        way(weights + 1)
        assert copies.taken == [(None, (6,))], way
    for way in (float, int, bool, type(weights).item, np.asarray):
        copies.taken.clear()
        way(jax.numpy.sum(weights))
        assert copies.taken == [(None, ())], way


@jax_only
@pytest.mark.every_backend(cases=2)
@pytest.mark.parametrize("accelerator", [False, True], ids=["this device", "as on an accelerator"])
def test_between_mask_updates_fit_keeps_its_state_and_nothing_leaves_the_device(samples, monkeypatch, accelerator):
    if accelerator:
        as_on_an_accelerator(monkeypatch)
    layers = [
        keras.layers.Dense(16, "relu", name="hidden", dtype="bfloat16"),
        keras.layers.Dense(4, name="logits", dtype="bfloat16"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), LOSS)
    synchronised, batch = [], Batch()
    pruning = PruningCallback(PolynomialDecay(0.0, 0.75, begin_step=0, end_step=60, frequency=20), allocation="uniform")
    original = type(model).jax_state_sync

    def synchronise(model):
        if not model._jax_state_synced:
            synchronised.append(batch.count)
        return original(model)

    monkeypatch.setattr(type(model), "jax_state_sync", synchronise)
    x, y = (array[:64] for array in samples)
    copies = HostCopies(monkeypatch, lambda: batch.count)
    model.fit(x, y, batch_size=16, epochs=16, verbose=0, callbacks=[pruning, batch])
    taken = list(copies.taken)
    assert [event.step for event in pruning.report.events] == [0, 20, 40, 60]
    # Every fourth batch ends an epoch, when Keras itself asks; the one after an update is checked for leaks.
    looked = {*range(0, 65, 4), 1, 20, 21, 40, 41, 60, 61}
    assert set(synchronised) <= looked
    # The loss, which Keras reads where any callback has an on_train_batch_end; never a weight, a mask or a counter.
    assert [one for one in taken if one[0] not in looked] == [
        (number, ()) for number in range(1, 65) if number not in looked
    ]
    # Counts, one figure for each weight.
    assert all(np.prod(shape) <= 3 * 2 for _, shape in taken)
