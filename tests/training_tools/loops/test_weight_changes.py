"""What updates did to the weights, against copies of the weights that a callback takes after each batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from weight_copies import LOSS, OPTIMIZERS, Copies, network

import prunekit as pk


def tolerance(precision):
    return {"rtol": 1e-4, "atol": 1e-7} if precision == "float32" else {"rtol": 1e-11, "atol": 1e-14}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.short(cases=5)
def test_changes_are_those_of_the_weights_and_not_of_the_gradients(name, samples, precision):
    # Not with accumulation: Keras calls constraints in batches without an update as well, and MaxNorm moves a weight by
    # its epsilon there.
    constraint = None if name == "accumulating" else keras.constraints.MaxNorm(1.0)
    model, copies = network(constraint), Copies()
    model.compile(OPTIMIZERS[name](), LOSS)
    with pk.loops.WeightChanges(model) as changes:
        model.fit(*samples, epochs=2, batch_size=14, verbose=0, callbacks=[copies])
    moved, norms = copies.changes(every=2 if name == "accumulating" else 1)
    rows = changes.report.weights
    assert [row.name for row in rows] == ["hidden/kernel", "hidden/bias", "logits/kernel", "logits/bias"]
    assert [row.updates for row in rows] == [len(moved)] * 4
    close = tolerance(precision)
    np.testing.assert_allclose([row.change for row in rows], moved.mean(axis=0), **close)
    np.testing.assert_allclose([row.largest for row in rows], moved.max(axis=0), **close)
    np.testing.assert_allclose([row.norm for row in rows], norms.mean(axis=0), **close)
    np.testing.assert_allclose([row.relative for row in rows], moved.mean(axis=0) / norms.mean(axis=0), **close)
    np.testing.assert_allclose([row.last for row in rows], moved[-1], **close)


@pytest.mark.parametrize("name", ["momentum", "adamw", "accumulating"])
def test_measuring_changes_no_bit_of_the_training(name, samples):
    def trained(measured):
        keras.utils.set_random_seed(4)
        model = network()
        model.compile(OPTIMIZERS[name](), LOSS)
        if measured:
            with pk.loops.WeightChanges(model):
                model.fit(*samples, epochs=2, batch_size=16, verbose=0)
        else:
            model.fit(*samples, epochs=2, batch_size=16, verbose=0)
        return model.get_weights()

    for plain, measured in zip(trained(False), trained(True), strict=True):
        np.testing.assert_array_equal(plain, measured)


def test_a_step_that_measures_is_traced_once_and_never_leaves_the_device(perceptron, samples):
    optimizer = keras.optimizers.Adam(0.01)
    with pk.loops.WeightChanges(perceptron, optimizer) as changes:
        loop = pk.loops.TapeLoop(perceptron, optimizer, LOSS)
        loop.fit(*samples, epochs=2, batch_size=16)
        assert loop._train.traces == 1
        kinds = {operation.type for graph in loop._train.graphs for operation in graph.get_operations()}
    assert not kinds & {"PyFunc", "EagerPyFunc", "PyFuncStateless", "HostCompute"}
    assert [row.updates for row in changes.report.weights] == [10] * 4


def test_a_loop_of_the_users_own_with_two_optimizers_is_measured(samples):
    model = network()
    features, labels = map(tf.constant, samples)
    parts = {
        keras.optimizers.SGD(0.1): model.layers[0].trainable_variables,
        keras.optimizers.Adam(0.01): model.layers[1].trainable_variables,
    }
    for optimizer, variables in parts.items():
        optimizer.build(variables)
    with pk.loops.WeightChanges(model, list(parts)) as changes:

        @tf.function
        def step(index):
            with tf.GradientTape() as tape:
                loss = LOSS(labels, model(features, training=True))
            variables = list(parts.values())[index]
            list(parts)[index].apply(tape.gradient(loss, variables), variables)

        before = [np.array(variable.numpy()) for variable in model.trainable_variables]
        step(0)
        step(1)
    rows = changes.report.weights
    after = [np.array(variable.numpy()) for variable in model.trainable_variables]
    assert [row.updates for row in rows] == [1] * 4
    wanted = [np.linalg.norm(new - old) for old, new in zip(before, after, strict=True)]
    np.testing.assert_allclose([row.last for row in rows], wanted, rtol=1e-4)


def test_a_step_that_was_traced_before_is_an_error_that_names_the_remedy(perceptron, samples):
    optimizer = keras.optimizers.SGD(0.1)
    features, labels = map(tf.constant, samples)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = LOSS(labels, perceptron(features, training=True))
        optimizer.apply(tape.gradient(loss, perceptron.trainable_variables), perceptron.trainable_variables)

    step()
    with pk.loops.WeightChanges(perceptron, optimizer) as changes:
        step()
        with pytest.raises(RuntimeError, match="made 1 updates, and none of them was measured.*Enter it first"):
            changes.report  # noqa: B018


def test_another_optimizer_than_at_first_is_an_error_and_not_an_empty_report(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        perceptron.compile("adam", LOSS)
        perceptron.fit(*samples, verbose=0)
        with pytest.raises(RuntimeError, match="made 3 updates, and none.*compiled with another optimizer"):
            changes.report  # noqa: B018


def test_a_tape_loop_that_ran_before_is_measured_and_continues_unmeasured_afterwards(perceptron, samples):
    optimizer = keras.optimizers.SGD(0.1)
    loop = pk.loops.TapeLoop(perceptron, optimizer, LOSS)
    loop.step(*samples)
    with pk.loops.WeightChanges(perceptron, optimizer) as changes:
        loop.step(*samples)
    loop.step(*samples)
    assert changes.report.weights[0].updates == 1
    assert loop._train.traces == 1


def test_a_model_that_was_fitted_before_is_measured_and_comes_back_as_it_was(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    perceptron.fit(*samples, verbose=0)
    former = perceptron.train_function
    with pytest.raises(ZeroDivisionError), pk.loops.WeightChanges(perceptron) as changes:
        perceptron.fit(*samples, verbose=0)
        raise ZeroDivisionError
    assert changes.report.weights[0].updates == 3
    assert "apply" not in vars(perceptron.optimizer)
    assert perceptron.train_function is former
    perceptron.fit(*samples, verbose=0)
    assert changes.report.weights[0].updates == 3


def test_figures_begin_again_after_a_reset_and_are_nan_before_any_update(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        assert np.isnan(changes.report.weights[0].change) and "nan" in str(changes.report)
        perceptron.fit(*samples, batch_size=70, epochs=3, verbose=0)
        changes.reset()
        perceptron.fit(*samples, batch_size=70, verbose=0)
    report = changes.report
    assert report.weights[0].updates == 1 and report.weights[0].change == report.weights[0].last
    assert report.to_dict()["weights"][0]["relative"] == report.weights[0].relative


def test_the_relative_change_of_a_weight_that_was_zero_is_infinite(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        perceptron.fit(*samples, batch_size=70, verbose=0)
    assert changes.report.weights[3].relative == np.inf
    perceptron.optimizer.learning_rate = 0.0
    for variable in perceptron.trainable_variables:
        variable.assign(np.zeros(variable.shape))
    changes.reset()
    with changes:
        perceptron.fit(*samples, batch_size=70, verbose=0)
    assert changes.report.weights[3].relative == 0.0


def test_half_precision_weights_are_measured_in_float32(samples):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, dtype="float16", name="half")])
    model.layers[0].kernel.assign(np.full((8, 4), 300.0))  # 300 ** 2 is infinite in float16
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    with pk.loops.WeightChanges(model) as changes:
        model.fit(*samples, batch_size=70, verbose=0)
    assert changes.report.weights[0].norm == pytest.approx(300 * np.sqrt(32))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda model: pk.loops.WeightChanges(model), ValueError, "without an optimizer. Compile it, or pass"),
        (lambda model: pk.loops.WeightChanges(model, "adam"), TypeError, "must be a Keras optimizer.*Received: 'adam'"),
        (lambda model: pk.loops.WeightChanges(7), TypeError, "works on Keras 3 models"),
    ],
    ids=["no optimizer", "a name", "no model"],
)
def test_wrong_arguments_are_refused_in_one_line(make, error, message, perceptron):
    with pytest.raises(error, match=message) as raised:
        make(perceptron)
    assert "\n" not in str(raised.value)


def test_a_report_without_the_block_is_refused(perceptron):
    with pytest.raises(RuntimeError, match="Train inside `with"):
        pk.loops.WeightChanges(perceptron, keras.optimizers.SGD()).report  # noqa: B018


def test_a_model_without_trainable_weights_is_refused(perceptron):
    perceptron.trainable = False
    with pytest.raises(ValueError, match="without trainable weights"):
        pk.loops.WeightChanges(perceptron, keras.optimizers.SGD())


# Scopes in scopes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entered", "left"),
    [
        ((0, 1, 2), (0, 1, 2)),
        ((0, 2, 1), (0, 1, 2)),
        ((1, 0, 2), (1, 2, 0)),
        ((1, 2, 0), (1, 0, 2)),
        ((2, 0, 1), (2, 0, 1)),
        ((2, 1, 0), (2, 0, 1)),
    ],
    ids=str,
)
@pytest.mark.short(cases=3)
def test_zeros_hold_while_scopes_come_and_go_in_any_order(entered, left, perceptron, samples):
    # Without momentum, a weight whose gradient is stopped stands still.
    optimizer = keras.optimizers.SGD(0.1)
    perceptron.compile(optimizer, LOSS)
    perceptron.make_train_function()
    function, inside = perceptron.train_function, set()
    unpruned = pk.loops.TapeLoop(perceptron, optimizer, LOSS)
    hidden = perceptron.layers[0]
    changes, loop, bias = pk.loops.WeightChanges(perceptron), unpruned, hidden.bias.numpy()
    scopes = [changes, pk.gradients.intercepting(perceptron, {hidden.name: tf.zeros_like}), None]

    def step():
        nonlocal bias
        loop.step(*samples)
        former, bias = bias, hidden.bias.numpy()
        assert (np.all(former == bias)) == (1 in inside), "intercepted inside, and nowhere else"
        if 2 in inside:
            assert [np.mean(layer.kernel.numpy() == 0) for layer in perceptron.layers] == [0.5, 0.5]

    for one in entered:
        if one == 2:
            scopes[2] = pk.Pruner(
                perceptron,
                pk.schedules.ConstantSparsity(0.5, begin_step=0, frequency=1),
                optimizer,
                allocation="uniform",
            )
            loop = pk.loops.TapeLoop(perceptron, optimizer, LOSS, scopes[2])
        scopes[one].__enter__()
        inside.add(one)
        step()
    for one in left:
        scopes[one].__exit__(None, None, None)
        inside.remove(one)
        loop = loop if 2 in inside else pk.loops.TapeLoop(perceptron, optimizer, LOSS)
        step()
    assert "apply" not in vars(optimizer) and "call" not in vars(hidden)
    assert perceptron.train_function is function and not any("before" in name for name in vars(perceptron))
    measured = changes.report.weights[0].updates
    assert measured == len(entered) - entered.index(0) + left.index(0), "every update inside, and no other"


def test_entering_it_inside_itself_is_refused(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        with pytest.raises(RuntimeError, match="is already active. Use a second WeightChanges"):
            changes.__enter__()
        perceptron.fit(*samples, batch_size=16, verbose=0)
    with changes:
        perceptron.fit(*samples, batch_size=16, verbose=0)
    assert changes.report.weights[0].updates == 2 * -(-len(samples[0]) // 16)
