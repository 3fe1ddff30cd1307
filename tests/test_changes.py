"""What updates did to the weights, against copies of the weights that a callback takes after each batch."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import prunekit as pk
from prunekit.training.changes import Movements

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "muon": lambda: keras.optimizers.Muon(0.01),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Copies(keras.callbacks.Callback):
    """Every trainable weight before the first batch and after each."""

    def on_train_begin(self, logs=None):
        self.taken = [self._now()]

    def on_train_batch_end(self, batch, logs=None):
        self.taken.append(self._now())

    def _now(self):
        return [np.array(variable.numpy(), "float64") for variable in self.model.trainable_variables]

    def changes(self, every=1):
        """(norms of changes, norms of weights), of shape (updates, weights)."""
        pairs = list(itertools.pairwise(self.taken[::every]))
        norms = [[np.linalg.norm(before) for before in old] for old, _ in pairs]
        return np.array([[np.linalg.norm(b - a) for a, b in zip(*pair, strict=True)] for pair in pairs]), np.array(
            norms
        )

    def movements(self):
        pairs = list(itertools.pairwise(self.taken))
        return [sum(old[i] * (new[i] - old[i]) for old, new in pairs) for i in range(len(self.taken[0]))]


def network(constraint=None):
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu", name="hidden", kernel_constraint=constraint),
            keras.layers.Dense(4, name="logits"),
        ]
    )


def tolerance(precision):
    return {"rtol": 1e-4, "atol": 1e-7} if precision == "float32" else {"rtol": 1e-11, "atol": 1e-14}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_changes_are_those_of_the_weights_and_not_of_the_gradients(name, samples, precision):
    # Not with accumulation: Keras calls constraints in batches without an update as well, and MaxNorm moves a weight by
    # its epsilon there.
    constraint = None if name == "accumulating" else keras.constraints.MaxNorm(1.0)
    model, copies = network(constraint), Copies()
    model.compile(OPTIMIZERS[name](), LOSS)
    with pk.loops.WeightChanges(model) as changes:
        model.fit(*samples, epochs=2, batch_size=14, verbose=0, callbacks=[copies])
    moved, norms = copies.changes(every=2 if name == "accumulating" else 1)
    rows = changes.report().weights
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
    assert [row.updates for row in changes.report().weights] == [10] * 4


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
    rows = changes.report().weights
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
            changes.report()


def test_another_optimizer_than_at_first_is_an_error_and_not_an_empty_report(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        perceptron.compile("adam", LOSS)
        perceptron.fit(*samples, verbose=0)
        with pytest.raises(RuntimeError, match="made 3 updates, and none.*compiled with another optimizer"):
            changes.report()


def test_a_tape_loop_that_ran_before_is_measured_and_goes_on_unmeasured_afterwards(perceptron, samples):
    optimizer = keras.optimizers.SGD(0.1)
    loop = pk.loops.TapeLoop(perceptron, optimizer, LOSS)
    loop.step(*samples)
    with pk.loops.WeightChanges(perceptron, optimizer) as changes:
        loop.step(*samples)
    loop.step(*samples)
    assert changes.report().weights[0].updates == 1
    assert loop._train.traces == 1


def test_a_model_that_was_fitted_before_is_measured_and_comes_back_as_it_was(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    perceptron.fit(*samples, verbose=0)
    former = perceptron.train_function
    with pytest.raises(ZeroDivisionError), pk.loops.WeightChanges(perceptron) as changes:
        perceptron.fit(*samples, verbose=0)
        raise ZeroDivisionError
    assert changes.report().weights[0].updates == 3
    assert "apply" not in vars(perceptron.optimizer)
    assert perceptron.train_function is former
    perceptron.fit(*samples, verbose=0)
    assert changes.report().weights[0].updates == 3


def test_figures_begin_anew_after_a_reset_and_are_nan_before_any_update(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        assert np.isnan(changes.report().weights[0].change) and "nan" in str(changes.report())
        perceptron.fit(*samples, batch_size=70, epochs=3, verbose=0)
        changes.reset()
        perceptron.fit(*samples, batch_size=70, verbose=0)
    report = changes.report()
    assert report.weights[0].updates == 1 and report.weights[0].change == report.weights[0].last
    assert report.to_dict()["weights"][0]["relative"] == report.weights[0].relative


def test_the_relative_change_of_a_weight_that_was_zero_is_infinite(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        perceptron.fit(*samples, batch_size=70, verbose=0)
    assert changes.report().weights[3].relative == np.inf
    perceptron.optimizer.learning_rate = 0.0
    for variable in perceptron.trainable_variables:
        variable.assign(np.zeros(variable.shape))
    changes.reset()
    with changes:
        perceptron.fit(*samples, batch_size=70, verbose=0)
    assert changes.report().weights[3].relative == 0.0


def test_half_precision_weights_are_measured_in_float32(samples):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, dtype="float16", name="half")])
    model.layers[0].kernel.assign(np.full((8, 4), 300.0))  # 300 ** 2 is infinite in float16
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    with pk.loops.WeightChanges(model) as changes:
        model.fit(*samples, batch_size=70, verbose=0)
    assert changes.report().weights[0].norm == pytest.approx(300 * np.sqrt(32))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda model: pk.loops.WeightChanges(model), ValueError, "without an optimizer. Compile it, or pass"),
        (lambda model: pk.loops.WeightChanges(model, "adam"), TypeError, "is a Keras optimizer.*Received: 'adam'"),
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
        pk.loops.WeightChanges(perceptron, keras.optimizers.SGD()).report()


def test_a_model_without_trainable_weights_is_refused(perceptron):
    perceptron.trainable = False
    with pytest.raises(ValueError, match="without trainable weights"):
        pk.loops.WeightChanges(perceptron, keras.optimizers.SGD())


# ---------------------------------------------------------------- movement


def pruning(**options):
    schedule = pk.ConstantSparsity(0.5, begin_step=8, frequency=100)
    return pk.PruningCallback(schedule, criterion="movement", **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_movement_prunes_what_the_updates_drove_towards_zero(name, samples, precision):
    model, copies, callback = network(), Copies(), pruning()
    model.compile(OPTIMIZERS[name](), LOSS)
    epochs = 4 if name == "accumulating" else 2
    model.fit(*samples, epochs=epochs, batch_size=14, verbose=0, callbacks=[copies, callback])
    batches = 16 if name == "accumulating" else 8
    copies.taken = copies.taken[: batches + 1]
    # The ninth copy is taken before this callback's masks: it shows what the update did, and not what was pruned.
    for index, target in zip((0, 2), ("hidden/kernel", "logits/kernel"), strict=True):
        movement = copies.movements()[index]
        kept = callback.pruner.masks[target]
        assert kept.sum() == kept.size // 2
        # Ranks may swap where two movements differ by rounding.
        slack = 1e-4 * np.abs(movement).max() if precision == "float32" else 1e-12
        assert movement[kept].min() >= movement[~kept].max() - slack


def test_movement_under_gradient_descent_is_the_sum_of_the_paper(perceptron, samples):
    features, labels = map(tf.constant, samples)
    optimizer = keras.optimizers.SGD(0.1)
    kernels = [layer.kernel for layer in perceptron.layers]
    movements, expected = Movements(kernels, perceptron), [0.0, 0.0]
    with movements.observing([optimizer]):
        for _ in range(5):
            with tf.GradientTape() as tape:
                loss = LOSS(labels, perceptron(features))
            variables = perceptron.trainable_variables
            gradients = tape.gradient(loss, variables)
            for i, kernel in enumerate(kernels):
                expected[i] = expected[i] - 0.1 * kernel.numpy() * gradients[2 * i].numpy()
            optimizer.apply(gradients, variables)
    assert movements.updates == 5
    for found, wanted in zip(movements.sums, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("options", [{"allocation": "global"}, {"pattern": "channel"}, {"pattern": "2:4"}], ids=str)
def test_movement_goes_with_every_pattern_and_allocation(options, perceptron, samples):
    perceptron.compile("adam", LOSS)
    callback = pruning(**options)
    perceptron.fit(*samples, epochs=3, batch_size=16, verbose=0, callbacks=[callback])
    assert callback.pruner.sparsity == 0.5
    assert sum(callback.pruner.audit().values()) == 0


def test_a_sparse_model_goes_on_with_its_masks_where_nothing_was_seen_yet(perceptron, samples):
    pk.prune(perceptron, 0.5)
    zeros = [layer.kernel.numpy() == 0 for layer in perceptron.layers]
    perceptron.compile("sgd", LOSS)
    callback = pk.PruningCallback(pk.ConstantSparsity(0.5, begin_step=0, frequency=2), criterion="movement")
    perceptron.fit(*samples, batch_size=16, verbose=0, callbacks=[callback])
    for layer, zero in zip(perceptron.layers, zeros, strict=True):
        np.testing.assert_array_equal(layer.kernel.numpy() == 0, zero)


def test_movement_before_any_update_is_an_error_that_names_the_remedy(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    callback = pk.PruningCallback(pk.OneShot(0.5), criterion="movement")
    with pytest.raises(ValueError, match="sparsity 0.5 at step 0, and no update.*Let the schedule begin later"):
        perceptron.fit(*samples, verbose=0, callbacks=[callback])
    with pytest.raises(ValueError, match="pk.prune trains nothing"):
        pk.prune(perceptron, 0.5, criterion="movement")


def test_a_statistic_that_nobody_gathers_is_refused_by_name(perceptron):
    class Hungry(pk.Movement):
        needs = frozenset({"movement", "activations"})

    with pytest.raises(ValueError, match='gathers for criteria is "movement".*which needs activations'):
        pk.Pruner(perceptron, pk.ConstantSparsity(0.5, begin_step=1), criterion=Hungry())


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("why", ["frozen", "no gradient", "zero so far"])
def test_weights_that_no_update_moved_are_named_and_not_pruned_by_position(why, samples):
    inputs = keras.Input((8,))
    layer = keras.layers.Dense(4, name="still", kernel_initializer="zeros" if why == "zero so far" else "normal")
    still, outputs = layer(inputs), keras.layers.Dense(4, name="logits")(inputs)
    layer.trainable = why != "frozen"
    model = keras.Model(inputs, [outputs, still])
    model.compile("sgd", [LOSS, None if why == "no gradient" else LOSS])
    x, y = samples
    labels = [y, None if why == "no gradient" else y]
    callback = pk.PruningCallback(pk.ConstantSparsity(0.5, begin_step=1, frequency=1), criterion="movement")
    with pytest.raises(ValueError, match="none that moved in still/kernel. Frozen layers"):
        model.fit(x, labels, batch_size=16, verbose=0, callbacks=[callback])
    assert np.all(model.get_layer("logits").kernel.numpy() != 0), "the masks are as they were"


def test_a_training_that_is_resumed_where_masks_are_due_goes_on(samples, tmp_path):
    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise RuntimeError("crash")

    def train(*more):
        model = network()
        model.compile("sgd", LOSS)
        schedule = pk.PolynomialDecay(final_sparsity=0.5, end_step=4, frequency=1)
        pruning = pk.PruningCallback(schedule, criterion="movement")
        # Saved before the pruner's step: the weights are less sparse than the schedule asks at their step.
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=2)
        model.fit(*samples, batch_size=8, epochs=2, verbose=0, callbacks=[backup, pruning, *more])
        return pruning.pruner

    with pytest.raises(RuntimeError, match="crash"):
        train(Crash())
    # As a backup that was made without the pruners' state.
    for file in (tmp_path / "backup").glob("prunekit-*"):
        file.unlink()
    pruner = train()
    assert pruner.events[0].step == 3, "what was due at step 2 was done after the first update"
    assert pruner.sparsity == 0.5 and not any(pruner.audit().values())


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
            scopes[2] = pk.Pruner(perceptron, pk.ConstantSparsity(0.5, begin_step=0, frequency=1), optimizer)
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
    measured = changes.report().weights[0].updates
    assert measured == len(entered) - entered.index(0) + left.index(0), "every update inside, and no other"


def test_entering_it_inside_itself_is_refused(perceptron, samples):
    perceptron.compile("sgd", LOSS)
    with pk.loops.WeightChanges(perceptron) as changes:
        with pytest.raises(RuntimeError, match="measures already. Make a second one"):
            changes.__enter__()
        perceptron.fit(*samples, batch_size=16, verbose=0)
    with changes:
        perceptron.fit(*samples, batch_size=16, verbose=0)
    assert changes.report().weights[0].updates == 2 * -(-len(samples[0]) // 16)
