"""GradientAccumulator beside the large batch, plain NumPy, and TensorFlow's own conditional accumulators."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from prunekit.training_tools.loops.gradient_accumulator import GradientAccumulator


def variables(*shapes, dtype="float32"):
    return [keras.Variable(np.zeros(shape), dtype=dtype) for shape in shapes]


def slices(rows, indices, shape):
    return tf.IndexedSlices(tf.constant(rows, "float32"), tf.constant(indices, "int64"), tf.constant(shape, "int64"))


def embedding_model(dtype="float32"):
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(11, 4, dtype=dtype),
            keras.layers.Flatten(dtype=dtype),
            keras.layers.Dense(2, dtype=dtype),
        ]
    )


def gradients_of(model, x, y):
    with tf.GradientTape() as tape:
        value = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(value, model.trainable_variables)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "in a tf.function"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_micro_batches_of_any_size_are_those_of_the_large_batch(dtype, compiled):
    model = embedding_model(dtype)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (30, 3)), rng.normal(size=(30, 2)).astype(dtype)
    accumulator = GradientAccumulator(model.trainable_variables)

    def contribute(x, y):
        return accumulator.add(gradients_of(model, x, y), weight=tf.shape(x)[0])

    def large():
        return accumulator.take()

    if compiled:
        contribute, large = tf.function(contribute), tf.function(large)
    for begin, end in ((0, 7), (7, 8), (8, 30)):
        assert contribute(tf.constant(x[begin:end]), tf.constant(y[begin:end]))
    taken, expected = large(), gradients_of(model, tf.constant(x), tf.constant(y))
    assert isinstance(taken[0], tf.IndexedSlices)
    assert sorted(taken[0].indices.numpy()) == sorted(set(x.ravel()))
    for one, other in zip(taken, expected, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-5 if dtype == "float32" else 1e-12
        )


def run_conditional_accumulator(contributions, shape, sparse):
    """(taken flags are not given by TensorFlow) means and steps of its own accumulator, from a v1 session."""
    kind = tf.compat.v1.SparseConditionalAccumulator if sparse else tf.compat.v1.ConditionalAccumulator
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        accumulator = kind("float32", shape=shape)
        found = []
        for what, value in contributions:
            if what == "take":
                taken = accumulator.take_indexed_slices_grad(1) if sparse else accumulator.take_grad(1)
                found.append(session.run(taken))
            elif what == "step":
                session.run(accumulator.set_global_step(value))
            else:
                gradient, step = value
                apply = accumulator.apply_indexed_slices_grad if sparse else accumulator.apply_grad
                session.run(apply(slices(*gradient, shape) if sparse else gradient, local_step=step))
        return found


def run_ours(contributions, shape, sparse):
    accumulator = GradientAccumulator(variables(shape), row_average="rows")
    found, taken = [], []
    for what, value in contributions:
        if what == "take":
            found.append(accumulator.take()[0])
        elif what == "step":
            accumulator.set_step(value)
        else:
            gradient, step = value
            gradient = slices(*gradient, shape) if sparse else tf.constant(gradient, "float32")
            taken.append(accumulator.add([gradient], step))
    return found, taken, accumulator


def test_what_is_too_old_is_dropped_as_tensorflows_conditional_accumulator_drops_it():
    rng = np.random.default_rng(1)
    one, two, three, four = (rng.normal(size=(3, 2)).astype("float32") for _ in range(4))
    contributions = [
        ("add", (one, 0)), ("add", (two, 3)), ("take", None), ("add", (three, 0)), ("add", (four, 1)), ("take", None),
        ("step", 7), ("add", (one, 6)), ("add", (two, 7)), ("add", (three, 8)), ("take", None),
    ]  # fmt: skip
    found, taken, accumulator = run_ours(contributions, (3, 2), sparse=False)
    expected = run_conditional_accumulator(contributions, (3, 2), sparse=False)
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert taken == [True, True, False, True, False, True, True]
    assert (accumulator.dropped, accumulator.step, accumulator.count) == (2, 8, 0)


def test_rows_of_sparse_gradients_are_averaged_as_its_sparse_twin_does():
    contributions = [
        ("add", (([[1.0, 2.0], [3.0, 4.0]], [0, 2]), 0)), ("add", (([[10.0, 20.0]], [2]), 0)), ("take", None),
        ("add", (([[9.0, 9.0]], [1]), 0)), ("add", (([[5.0, 6.0], [7.0, 8.0]], [3, 1]), 1)), ("take", None),
    ]  # fmt: skip
    found, taken, accumulator = run_ours(contributions, (4, 2), sparse=True)
    expected = run_conditional_accumulator(contributions, (4, 2), sparse=True)
    for ours, theirs in zip(found, expected, strict=True):
        order = np.argsort(theirs.indices)
        np.testing.assert_array_equal(ours.indices, theirs.indices[order])
        np.testing.assert_allclose(ours.values, theirs.values[order], rtol=1e-6)
    assert (taken, accumulator.dropped) == ([True, True, False, True], 1)


def test_gradients_may_be_plain_arrays():
    accumulator = GradientAccumulator(variables((2,)))
    accumulator.add([np.array([1.0, 3.0], "float32")])
    np.testing.assert_array_equal(accumulator.take()[0], [1.0, 3.0])


def test_a_gradient_that_is_always_none_stays_none():
    accumulator = GradientAccumulator(variables((2,), (3,)))
    accumulator.add([None, tf.ones(3)])
    accumulator.add([None, 3 * tf.ones(3)])
    none, mean = accumulator.take()
    assert none is None
    np.testing.assert_array_equal(mean, [2.0, 2.0, 2.0])


def test_a_gradient_that_is_none_only_once_counts_as_zero():
    accumulator = GradientAccumulator(variables((2,)))
    accumulator.add([None])
    accumulator.add([tf.constant([4.0, 2.0])])
    np.testing.assert_array_equal(accumulator.take()[0], [2.0, 1.0])


def test_dense_and_sparse_gradients_of_one_variable_add_up():
    for first_dense in (True, False):
        accumulator = GradientAccumulator(variables((3, 1)))
        both = [tf.ones((3, 1)), slices([[5.0]], [1], (3, 1))]
        for gradient in both if first_dense else both[::-1]:
            accumulator.add([gradient])
        np.testing.assert_array_equal(tf.convert_to_tensor(accumulator.take()[0]), [[0.5], [3.0], [0.5]])


def test_taking_empties_it_and_what_was_taken_stays_as_it_was():
    accumulator = GradientAccumulator(variables((2,), (3, 1)))
    accumulator.add([tf.constant([1.0, 2.0]), slices([[5.0]], [1], (3, 1))])
    first = accumulator.take()
    accumulator.add([tf.constant([7.0, 7.0]), slices([[8.0]], [2], (3, 1))])
    second = accumulator.take()
    np.testing.assert_array_equal(first[0], [1.0, 2.0])
    np.testing.assert_array_equal(first[1].values, [[5.0]])
    np.testing.assert_array_equal(second[0], [7.0, 7.0])
    assert (second[1].indices.numpy().tolist(), accumulator.step, accumulator.count) == ([2], 2, 0)


def test_taking_nothing_is_refused_and_says_what_was_dropped():
    accumulator = GradientAccumulator(variables((1,)))
    accumulator.add([tf.ones(1)])
    accumulator.take()
    assert accumulator.add([tf.ones(1)], local_step=0) is False
    with pytest.raises(ValueError, match="Nothing to take: .* 1 were dropped as older than step 1"):
        accumulator.take()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Nothing to take"):
        tf.function(accumulator.take)()


def test_wrong_contributions_are_refused():
    accumulator = GradientAccumulator(variables((2,), (3,)))
    with pytest.raises(ValueError, match="One gradient per variable is needed. Received: 1 gradients for 2 variables"):
        accumulator.add([tf.ones(2)])
    with pytest.raises(ValueError, match=r"shape of its variable. Received: shape \(2,\) for .* of shape \(3,\)"):
        accumulator.add([tf.ones(2), tf.ones(2)])
    with pytest.raises(ValueError, match="above zero. Received: weight=0"):
        accumulator.add([tf.ones(2), tf.ones(3)], weight=0)
    with pytest.raises(ValueError, match="never decreases. Received: step=-1, and the current step is 0"):
        accumulator.set_step(-1)
    with pytest.raises(ValueError, match='"contributions" or "rows". Received: row_average=\'sum\''):
        GradientAccumulator([], row_average="sum")
    assert accumulator.count == 0


def test_another_backend_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(RuntimeError, match="GradientAccumulator needs .* Received: the torch backend. Run with"):
        GradientAccumulator([])
