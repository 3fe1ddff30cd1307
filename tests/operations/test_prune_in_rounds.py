"""Pruning in rounds with rewinding: the trainings in plain NumPy, exact counts, and the refusals."""

import warnings

import keras
import numpy as np
import pytest
from backends import training_step
from networks import dense_network

import prunekit as pk
from prunekit.techniques.pruning.after_training.rounds import RewindPoint, round_sparsities

STEPS, MOMENTUM, RATE, DECAY = 4, 0.9, 0.05, 0.5
RNG = np.random.default_rng(5)
X = RNG.normal(size=(32, 6)).astype("float32")
Y = RNG.normal(size=(32, 5)).astype("float32")
START = RNG.normal(size=(6, 5)).astype("float32")


def linear():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, use_bias=False, name="linear")])
    model.layers[0].kernel.assign(START)
    rate = keras.optimizers.schedules.ExponentialDecay(RATE, 1, DECAY)
    model.compile(keras.optimizers.SGD(rate, momentum=MOMENTUM), "mse")
    return model


def trained_plainly(weight, velocity, iteration, mask):
    """Four updates of SGD with momentum and a decaying rate, in NumPy."""
    for _ in range(STEPS):
        gradient = np.where(mask, 2 * X.T @ (X @ weight - Y) / Y.size, 0)
        velocity = MOMENTUM * velocity - RATE * DECAY**iteration * gradient
        weight, iteration = np.where(mask, weight + velocity, 0), iteration + 1
    return weight, velocity, iteration


def in_rounds_plainly(sparsities, rewind, steps_before):
    """Iterative magnitude pruning with rewinding; returns the weight after the last round."""
    mask, zeros = np.ones_like(START, bool), np.zeros_like(START)
    point = trained_plainly(START, zeros, 0, mask) if steps_before else (START, zeros, 0)
    now = trained_plainly(*point, mask)
    for sparsity in sparsities:
        order = np.argsort(np.where(mask, np.abs(now[0]), -1), axis=None)
        mask = mask.ravel().copy()
        mask[order[: round(sparsity * mask.size)]] = False
        mask = mask.reshape(START.shape)
        if rewind == "weights":
            now = point
        elif rewind == "learning_rate":
            now = (*now[:2], point[2])
        now = trained_plainly(np.where(mask, now[0], 0), np.where(mask, now[1], 0), now[2], mask)
    return now[0]


def train(model):
    history = model.fit(X, Y, batch_size=32, epochs=STEPS, shuffle=False, verbose=0).history
    return history["loss"][-1]


@pytest.mark.every_backend(cases=2)
@pytest.mark.parametrize(
    ("rewind", "steps_before"),
    [
        ("weights", STEPS),
        ("learning_rate", STEPS),
        pytest.param("none", 0, marks=pytest.mark.thorough),
        pytest.param("weights", 0, marks=pytest.mark.thorough),
    ],
)
def test_rounds_are_the_plain_version(rewind, steps_before):
    model = linear()
    if steps_before:
        train(model)
    result = pk.prune_in_rounds(model, train, 0.8, rounds=3, rewind=rewind, allocation="uniform")
    wanted = in_rounds_plainly(round_sparsities(0.8, 3), rewind, steps_before)
    weight = keras.ops.convert_to_numpy(model.layers[0].kernel)
    np.testing.assert_allclose(weight, wanted, atol=1e-5)
    assert ((weight == 0) == (wanted == 0)).all()
    assert [(row.number, row.pruned) for row in result.rounds] == [(0, 0), (1, 12), (2, 20), (3, 24)]
    assert result.rounds[-1].sparsity == 0.8 and all(row.metric > 0 for row in result.rounds)
    assert result.report.targets == ("linear/kernel",)
    assert [row[2] for row in result.sections()[0].rows] == [0, 12, 20, 24]
    assert str(result).splitlines()[3].split()[:3] == ["2", "0.6667", "20"]


def test_each_round_prunes_the_same_fraction_of_what_is_left():
    left = 1 - np.array([0.0, *round_sparsities(0.9, 4)])
    np.testing.assert_allclose(left[1:] / left[:-1], 0.1**0.25)
    assert round_sparsities(0.9, 4)[-1] == 0.9 and round_sparsities(0.3, 1) == [0.3]


@pytest.mark.every_backend(cases=1)
def test_a_loop_of_the_users_own_trains_with_zeros_at_every_step(perceptron, samples):
    optimizer, loss = keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    seen = []

    def loop(model):
        step, kernel = training_step(model, optimizer, loss), model.layers[0].kernel
        for _ in range(3):
            step(*samples)
            seen.append(int(np.sum(keras.ops.convert_to_numpy(kernel) == 0)))

    result = pk.prune_in_rounds(perceptron, loop, 0.75, rounds=2, optimizer=optimizer, allocation="uniform")
    assert seen == [0] * 3 + [64] * 3 + [96] * 3
    assert result.rounds[0].metric is None and int(optimizer.iterations) == 3


def test_weights_are_rewound_with_statistics_and_slots_and_a_learning_rate_alone():
    model = keras.Sequential([keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Dense(5)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
    train(model)
    point = RewindPoint(model, [model.optimizer])
    train(model)
    after = [np.array(variable) for variable in model.weights]
    model.optimizer.learning_rate = 0.5
    point.rewind("none")
    assert int(model.optimizer.iterations) == 2 * STEPS
    point.rewind("learning_rate")
    assert int(model.optimizer.iterations) == STEPS
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    assert all((np.array(variable) == array).all() for variable, array in zip(model.weights, after, strict=True))
    point.rewind("weights")
    now = [*model.weights, *model.optimizer.variables]
    assert all((np.array(variable) == array).all() for variable, array in zip(now, point.arrays, strict=True))
    assert not all((np.array(variable) == array).all() for variable, array in zip(model.weights, after, strict=True))


REFUSED = [
    ({"rewind": "slots"}, "`rewind` is one of weights, learning_rate, none"),
    ({"rounds": 0}, "rounds"),
    ({"sparsity": 0.0}, "greater than 0"),
    ({"sparsity": 0.5, "pattern": "2:4"}, "Each round has another sparsity, and 2:4 has one"),
    ({"criterion": "movement"}, "observes updates"),
    ({"policy": "rigl"}, "pruned weights stay pruned"),
    ({"keep_zeros": False}, "pruned weights stay pruned"),
    ({"include": ["hiden"]}, "hiden"),
    ({"pattern": "block:9x9"}, "block"),
    ({"criterion": "wanda"}, "is collected from data. Received: no data"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_a_refusal_comes_before_the_first_training(arguments, said):
    def never(model):
        raise AssertionError("trained")

    with pytest.raises(ValueError, match=said):
        pk.prune_in_rounds(linear(), never, **{"sparsity": 0.8, **arguments})


def test_rounds_need_a_function_and_an_optimizer(perceptron):
    with pytest.raises(TypeError, match="`train` is a function"):
        pk.prune_in_rounds(linear(), 3, 0.5, allocation="uniform")
    with pytest.raises(ValueError, match="needs an optimizer"):
        pk.prune_in_rounds(perceptron, train, 0.5, allocation="uniform")
    with pytest.raises(ValueError, match="Received: `train` compiled the model again"):
        pk.prune_in_rounds(linear(), lambda model: model.compile("sgd", "mse"), 0.5, allocation="uniform")
    pair = [keras.optimizers.SGD(), keras.optimizers.SGD()]
    with pytest.raises(ValueError, match="2 optimizers, of which .* is not built"):
        pk.prune_in_rounds(perceptron, train, 0.5, optimizer=pair, allocation="uniform")


@pytest.mark.every_backend(cases=0)
def test_an_override_is_reached_in_the_last_round_in_proportion_to_the_sparsity():
    model = dense_network(6, activation=None, first=20, linear=5)
    model.compile("sgd", "mse")
    zeros = []

    def counted(model):
        train(model)
        zeros.append([int(np.sum(keras.ops.convert_to_numpy(layer.kernel) == 0)) for layer in model.layers])

    pk.prune_in_rounds(model, counted, 0.75, rounds=2, overrides={"first": 0.9}, allocation="uniform")
    # 120 and 100 weights; the first round prunes half of all.
    assert zeros == [[0, 0], [72, 38], [108, 57]]


@pytest.mark.parametrize(
    ("returned", "metric"),
    [
        (lambda history: history, "val_mae"),
        (lambda history: {"loss": [1.0], "mae": [3.0, 2.0]}, 2.0),
        (lambda history: {"loss": 1.5, "mae": 0.5}, 0.5),
        (lambda history: {"loss": [1.0, 0.25]}, 0.25),
    ],
    ids=["History", "without validation", "of evaluate", "loss alone"],
)
def test_what_fit_returns_is_read_as_its_main_metric(returned, metric):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    # Keras sorts the names of a History: the main metric is the first compiled one.
    model.compile("sgd", "mse", metrics=["mae", "accuracy"])
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 3), "float32")
    histories = []

    def train(model):
        histories.append(model.fit(x, y, epochs=2, verbose=0, validation_data=(x[:2], y[:2])))
        return returned(histories[-1])

    rows = pk.prune_in_rounds(model, train, 0.5, rounds=1).rounds
    expected = [one.history[metric][-1] for one in histories] if isinstance(metric, str) else [metric, metric]
    assert [row.metric for row in rows] == expected


@pytest.mark.parametrize("returned", [[1.0, 2.0], "0.9 of all", {"other": 1.0}], ids=["a list", "a text", "no metric"])
def test_a_training_that_returns_no_number_is_told_what_to_return(returned):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="`train` returns a metric as one number, what `fit` returns, or nothing"):
        pk.prune_in_rounds(model, lambda model: returned, 0.5, rounds=1)


def test_rounds_and_scans_leave_no_warning_of_numpy_in_the_terminal():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    x, y = np.ones((8, 4), "float32"), np.zeros((8, 3), "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        pk.prune_in_rounds(model, lambda model: model.train_on_batch(x, y), 0.5, rounds=1)
        assert pk.sensitivity(model, (x, y)).rows
