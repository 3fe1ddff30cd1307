"""Zeros hold whatever else is in `fit`, or breaks it: other callbacks, exceptions, loops around the optimizer."""

import itertools
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from prunekit.sparsity.schedules import ConstantSparsity, OneShot, PolynomialDecay
from prunekit.training.callbacks import PruningCallback
from prunekit.training.masking import LeakError
from prunekit.training.pruner import Pruner

LOSS = keras.losses.SparseCategoricalCrossentropy
RISE = PolynomialDecay(initial_sparsity=0.2, final_sparsity=0.75, begin_step=0, end_step=8, frequency=3)
AT_ONCE = ConstantSparsity(target_sparsity=0.5, frequency=1)


@pytest.fixture
def compiled(perceptron):
    perceptron.compile("adam", LOSS(from_logits=True))
    return perceptron


@pytest.fixture
def batches(samples):
    """5 batches of 16 as `fit` arguments: x, y and batch size; the last one has 6."""
    return {"x": samples[0], "y": samples[1], "batch_size": 16, "verbose": 0}


def kernels(model):
    return [np.asarray(v) for v in model.trainable_variables if v.name == "kernel"]


def zeros(model):
    return [int(np.count_nonzero(kernel == 0)) for kernel in kernels(model)]


def expected(model, sparsity):
    return [round(sparsity * kernel.size) for kernel in kernels(model)]


def expect_own(owner):
    """No attribute of the object is prunekit's."""
    for name, value in vars(owner).items():
        module = getattr(value, "__module__", None) or type(value).__module__
        assert not module.startswith("prunekit"), f"{type(owner).__name__}.{name} is {value!r}"


def expect_pristine(model, optimizers=None):
    """Nothing of prunekit's is on the model, its layers, its weights or its optimizers."""
    owners = [model, *model.layers, *model.variables, *(optimizers or [model.optimizer])]
    for owner in owners:
        expect_own(owner)
    for optimizer in optimizers or [model.optimizer]:
        assert "apply" not in vars(optimizer)


def expect_dense_training(model, batches):
    """A plain fit afterwards trains pruned weights again."""
    before = zeros(model)
    model.fit(**batches, epochs=2)
    assert all(after < some for after, some in zip(zeros(model), before, strict=True))


class Spy(keras.callbacks.Callback):
    """Counts zeros after each batch and checks that they never become fewer; True in `zeroed` is forever."""

    def __init__(self):
        super().__init__()
        self.zeroed, self.counts = None, []

    def on_train_batch_end(self, batch, logs=None):
        now = [kernel == 0 for kernel in kernels(self.model)]
        if self.zeroed is not None:
            assert not any(np.any(was & ~is_now) for was, is_now in zip(self.zeroed, now, strict=True))
        self.zeroed = now
        self.counts.append(zeros(self.model))
        expect_pristine(self.model)


# ---------------------------------------------------------------- the plain story


def test_frequency_100_and_a_number_of_steps_that_is_no_multiple_of_it_leave_no_small_weights(compiled, samples):
    # 7 epochs of 35 batches are 245 steps: the last update by frequency alone would be at 200.
    schedule = PolynomialDecay(initial_sparsity=0.0, final_sparsity=0.8, begin_step=0, end_step=245, frequency=100)
    spy = Spy()
    callback = PruningCallback(schedule)
    compiled.fit(*samples, batch_size=2, epochs=7, verbose=0, callbacks=[callback, spy])
    assert compiled.optimizer.iterations.numpy() == 245
    assert [event.step for event in callback.pruner.events] == [0, 100, 200, 245]
    assert zeros(compiled) == expected(compiled, 0.8)
    for kernel in kernels(compiled):
        left = np.abs(kernel[kernel != 0])
        # No pruned weight lives on as a tiny number: what is left is what ranked highest.
        assert left.min() > 1e-4
        assert not np.any(np.signbit(kernel[kernel == 0]))
    expect_pristine(compiled)


def test_with_accumulation_a_schedule_that_is_too_long_is_announced_in_updates_not_batches(compiled, batches):
    compiled.compile(keras.optimizers.SGD(gradient_accumulation_steps=4), LOSS(from_logits=True))
    # 10 batches are 2 updates.
    with pytest.warns(UserWarning, match="at step 8, but training (has only|ended after) 2 steps") as record:
        compiled.fit(**batches, epochs=2, callbacks=[PruningCallback(RISE)])
    assert "has only 2 steps" in str(record[0].message)


@pytest.mark.parametrize("count", [0, 1], ids=["before it is built", "of another number"])
def test_gradients_without_variables_are_refused_by_keras_itself(compiled, samples, count):
    with Pruner(compiled, AT_ONCE):
        for _ in range(count):
            compiled.train_on_batch(*samples)
        message = "optimizer is tracking 4" if count else "must already be built"
        with pytest.raises(ValueError, match=message):
            compiled.optimizer.apply([tf.zeros((8, 16))])


# ---------------------------------------------------------------- other callbacks


@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_early_stopping_that_restores_denser_weights_is_put_right_and_reported(compiled, batches, first):
    # Nothing is better than the first epoch, which ended at 0.6 of the final sparsity.
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", min_delta=1e9, patience=3, restore_best_weights=True)
    pruning = PruningCallback(RISE)
    with pytest.warns(UserWarning, match="written back at the end of training.*start_from_epoch"):
        compiled.fit(**batches, epochs=4, callbacks=[stopping, pruning] if first else [pruning, stopping])
    assert zeros(compiled) == expected(compiled, 0.75)
    assert any("zero again" in note for note in pruning.report.notes)
    expect_pristine(compiled)


def test_early_stopping_after_a_history_of_the_users_is_put_right_too(compiled, batches):
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", min_delta=1e9, patience=3, restore_best_weights=True)
    with pytest.warns(UserWarning, match="written back at the end of training"):
        compiled.fit(**batches, epochs=4, callbacks=[keras.callbacks.History(), PruningCallback(RISE), stopping])
    assert zeros(compiled) == expected(compiled, 0.75)
    expect_pristine(compiled)


def test_a_callback_list_of_the_users_without_history_ends_exact_after_an_earlier_fit(compiled, batches):
    compiled.optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    compiled.fit(**batches)
    pruning = PruningCallback(RISE)
    callbacks = keras.callbacks.CallbackList([pruning], add_history=False, model=compiled, epochs=2, steps=5)
    compiled.fit(**batches, epochs=2, callbacks=callbacks)
    assert zeros(compiled) == expected(compiled, 0.75)
    assert pruning.pruner.audit() == {"hidden/kernel": 0, "logits/kernel": 0}
    expect_pristine(compiled)


@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_every_checkpoint_is_sparse_and_loads_where_prunekit_cannot_be_imported(compiled, batches, tmp_path, first):
    saving = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch:02d}-{batch:02d}.keras"), save_freq=1)
    pruning = PruningCallback(RISE)
    compiled.fit(**batches, epochs=2, callbacks=[saving, pruning] if first else [pruning, saving])
    script = """
        import sys
        sys.modules["prunekit"] = None  # importing it is an ImportError from here on
        import keras, numpy as np, warnings
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        for path in sys.argv[1:]:
            model = keras.models.load_model(path)
            loss = model.evaluate(np.ones((4, 8), "float32"), np.zeros(4), verbose=0)
            counts = [int((np.asarray(layer.kernel) == 0).sum()) for layer in model.layers]
            print(*counts, len(model.optimizer.variables))
            assert np.isfinite(loss) and b"prunekit" not in open(path, "rb").read()
    """
    files = sorted(tmp_path.glob("*.keras"))
    assert len(files) == 10
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, files)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    counts = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    # Updates come at 0, 3, 6 and 8; a checkpoint listed before pruning sees a batch before its update.
    asked = [RISE(RISE.latest_update(step - 1 if first else step)) for step in range(1, 11)]
    assert counts == [(*expected(compiled, sparsity), len(compiled.optimizer.variables)) for sparsity in asked]


@pytest.mark.parametrize("broken", [1, 2])
def test_a_run_that_broke_is_resumed_in_a_new_model_and_ends_as_one_that_did_not(samples, tmp_path, broken):
    # An epoch has 4 steps: it breaks between two updates of the masks, and just after the last one.
    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == broken:
                raise RuntimeError("the machine is gone")

    def fit(*callbacks):
        keras.utils.set_random_seed(7)
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, name="hidden"), keras.layers.Dense(4, name="logits")]
        )
        model.compile("adam", LOSS(from_logits=True))
        pruning = PruningCallback(RISE)
        error = None
        try:
            model.fit(*samples, batch_size=20, epochs=3, shuffle=False, verbose=0, callbacks=[*callbacks, pruning])
        except RuntimeError as caught:
            error = caught
        return model, pruning, error

    whole, _, _ = fit()
    _, _, error = fit(keras.callbacks.BackupAndRestore(tmp_path), Break())
    assert "the machine is gone" in str(error)
    resumed, pruning, error = fit(keras.callbacks.BackupAndRestore(tmp_path))
    assert error is None
    assert resumed.optimizer.iterations.numpy() == 12
    assert pruning.pruner.step_count == 12
    assert zeros(resumed) == expected(resumed, 0.75)
    for one, other in zip(kernels(whole), kernels(resumed), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("swap_on_epoch", [False, True])
@pytest.mark.parametrize("first", [True, False], ids=["listed before", "listed after"])
def test_swapped_averages_are_as_sparse_as_the_weights(compiled, batches, swap_on_epoch, first):
    class AtTest(keras.callbacks.Callback):
        seen = ()

        def on_test_batch_end(self, batch, logs=None):
            self.seen = (*self.seen, zeros(self.model))

    compiled.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), LOSS(from_logits=True))
    swapping, pruning, spy, test = keras.callbacks.SwapEMAWeights(swap_on_epoch), PruningCallback(RISE), Spy(), AtTest()
    order = [swapping, pruning, test, spy] if first else [pruning, swapping, test, spy]
    validation = (batches["x"][:9], batches["y"][:9])
    compiled.fit(**batches, epochs=3, validation_data=validation, callbacks=order)
    assert test.seen == tuple(expected(compiled, RISE(RISE.latest_update(step))) for step in (5, 10, 15))
    assert zeros(compiled) == expected(compiled, 0.75)
    expect_pristine(compiled)


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", [ORDERS[i] for i in (0, 5, 9, 16, 23)], ids=str)
def test_the_callbacks_of_a_usual_training_work_in_any_order(compiled, batches, tmp_path, order):
    pytest.importorskip("tensorboard")
    pruning = PruningCallback(RISE)
    logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    board = keras.callbacks.TensorBoard(str(tmp_path / "board"), histogram_freq=1, update_freq="batch")
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    callbacks = [pruning, logger, board, plateau]
    history = compiled.fit(**batches, epochs=2, callbacks=[callbacks[i] for i in order])
    assert zeros(compiled) == expected(compiled, 0.75)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert len(lines) == 3
    # A logger that is listed after us also has the sparsity.
    assert ("sparsity" in lines[0]) == (order.index(1) > order.index(0))
    assert history.history["sparsity"][-1] == pytest.approx(sum(zeros(compiled)) / (8 * 16 + 16 * 4))
    assert list((tmp_path / "board").rglob("events*"))
    expect_pristine(compiled)


def test_two_pruning_callbacks_in_one_fit_hold_each_its_own_weights(compiled, batches):
    one = PruningCallback(RISE, include="hidden")
    other = PruningCallback(ConstantSparsity(0.5), include="logits")
    spies = [Spy(), Spy()]
    compiled.fit(**batches, epochs=2, callbacks=[spies[0], one, other, spies[1]])
    assert (np.array(compiled.get_layer("hidden").kernel) == 0).sum() == expected(compiled, 0.75)[0]
    assert (np.array(compiled.get_layer("logits").kernel) == 0).sum() == expected(compiled, 0.5)[1]
    assert not any([*one.pruner.audit().values(), *other.pruner.audit().values()])
    expect_pristine(compiled)


# ---------------------------------------------------------------- interruptions


class Raise(keras.callbacks.Callback):
    """Raises at one event, the third time it comes."""

    def __init__(self, event, error):
        super().__init__()
        self.times = 0

        def method(*arguments, **keywords):
            self.times += 1
            if self.times == 3:
                raise error

        setattr(self, event, method)


EVENTS = ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin", "on_epoch_end", "on_test_batch_end"]


@pytest.mark.parametrize(
    ("first", "error"),
    [(True, RuntimeError("broken")), (False, KeyboardInterrupt())],
    ids=["error, listed before", "interrupt, listed after"],
)
@pytest.mark.parametrize("event", EVENTS)
def test_an_exception_in_another_callback_leaves_the_model_detached_and_sparse(compiled, batches, event, error, first):
    compiled.fit(**batches)
    own = compiled.train_function
    raising, pruning = Raise(event, error), PruningCallback(AT_ONCE)
    validation = (batches["x"][:9], batches["y"][:9])
    with pytest.raises(type(error)):
        compiled.fit(
            **batches,
            epochs=4,
            validation_data=validation,
            callbacks=[raising, pruning] if first else [pruning, raising],
        )
    assert zeros(compiled) == expected(compiled, 0.5)
    assert compiled.train_function is own
    expect_pristine(compiled)
    expect_dense_training(compiled, batches)


@pytest.mark.parametrize("eagerly", [True, False], ids=["eager", "in the graph"])
def test_an_exception_in_the_train_step_leaves_the_model_detached_and_sparse(samples, batches, eagerly):
    class Fragile(keras.Model):
        fragile = True

        def train_step(self, data):
            if self.fragile and not eagerly:
                asserted = tf.debugging.assert_less(self.optimizer.iterations.value, tf.constant(3, "int64"))
                with tf.control_dependencies([asserted]):
                    data = (tf.identity(data[0]), data[1])
            if self.fragile and eagerly and int(self.optimizer.iterations) == 3:
                raise KeyboardInterrupt
            return super().train_step(data)

    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(4, name="logits")(keras.layers.Dense(16, name="hidden")(inputs))
    model = Fragile(inputs, outputs)
    model.compile("adam", LOSS(from_logits=True), run_eagerly=eagerly)
    with pytest.raises(KeyboardInterrupt if eagerly else tf.errors.InvalidArgumentError):
        model.fit(**batches, callbacks=[PruningCallback(AT_ONCE)])
    assert zeros(model) == expected(model, 0.5)
    assert model.train_function.__module__.startswith("keras.")
    expect_pristine(model)
    model.fragile = False
    model.make_train_function(force=True)
    expect_dense_training(model, batches)


@pytest.mark.parametrize("moment", ["before the update", "between the update and its enforcement"])
def test_an_interrupt_inside_an_eager_update_leaves_no_leak(compiled, batches, moment):
    class Interrupted(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            after = moment != "before the update"
            if after:
                variable.assign_add(tf.ones_like(variable))
            if int(self.iterations) == 2:
                raise KeyboardInterrupt
            super().update_step(gradient, variable, learning_rate)

    compiled.compile(Interrupted(0.1), LOSS(from_logits=True), run_eagerly=True)
    with pytest.raises(KeyboardInterrupt):
        compiled.fit(**batches, callbacks=[PruningCallback(AT_ONCE)])
    assert zeros(compiled) == expected(compiled, 0.5)
    expect_pristine(compiled)


@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
def test_an_exception_in_the_data_leaves_the_model_detached_and_sparse(compiled, batches, kind):
    x, y = batches["x"], batches["y"]

    def generate():
        yield x[:16], y[:16]
        yield x[16:32], y[16:32]
        raise ZeroDivisionError("no more data")

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index == 3:
                raise ZeroDivisionError("no more data")
            return x[index * 16 :][:16], y[index * 16 :][:16]

    data = generate() if kind == "generator" else Sequence()
    with pytest.raises((ZeroDivisionError, tf.errors.OpError), match="no more data"):
        compiled.fit(data, shuffle=False, verbose=0, callbacks=[PruningCallback(AT_ONCE)])
    assert zeros(compiled) == expected(compiled, 0.5)
    expect_pristine(compiled)
    expect_dense_training(compiled, batches)


def test_after_an_interrupt_and_after_an_end_the_history_is_kerass_own(compiled, batches):
    compiled.fit(**batches, callbacks=[PruningCallback(AT_ONCE)])
    expect_own(compiled.history)
    with pytest.raises(KeyboardInterrupt):
        compiled.fit(**batches, callbacks=[PruningCallback(AT_ONCE), Raise("on_train_batch_end", KeyboardInterrupt())])
    expect_own(compiled.history)


def test_after_an_interrupt_the_same_callback_goes_on_where_it_was(compiled, batches):
    pruning = PruningCallback(RISE)
    with pytest.raises(KeyboardInterrupt):
        compiled.fit(**batches, epochs=2, callbacks=[pruning, Raise("on_train_batch_end", KeyboardInterrupt())])
    assert pruning.pruner.step_count == 3
    # 3 + 5 steps are just enough: no warning that they are too few, and exact at the end.
    compiled.fit(**batches, callbacks=[pruning])
    assert pruning.pruner.step_count == 8
    assert zeros(compiled) == expected(compiled, 0.75)


def test_a_pruner_whose_loop_raises_is_detached_whatever_the_weights_became(compiled, samples):
    with pytest.raises(ZeroDivisionError), Pruner(compiled, OneShot(0.5, step=1)):
        compiled.get_layer("hidden").kernel.assign(np.full((8, 16), np.nan))
        raise ZeroDivisionError
    expect_pristine(compiled)


# ---------------------------------------------------------------- loops that go around the optimizer


def test_a_function_traced_before_the_pruner_is_detected_and_the_weights_put_right(compiled, samples):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = compiled.loss(y, compiled(x, training=True))
        gradients = tape.gradient(loss, compiled.trainable_variables)
        compiled.optimizer.apply(gradients, compiled.trainable_variables)

    step(*samples)
    with Pruner(compiled, AT_ONCE) as pruner:
        step(*samples)
        with pytest.raises(LeakError, match="build the Pruner before your tf.function is first called"):
            pruner.step()
        assert zeros(compiled) == expected(compiled, 0.5)


def custom_model(update):
    """A model whose train_step trains as usual, or not at all, and then calls `update(model)`."""

    class Custom(keras.Model):
        def train_step(self, data):
            logs = super().train_step(data) if update.__name__ != "instead" else {"loss": 0.0}
            update(self)
            return logs

    inputs = keras.Input((8,))
    outputs = keras.layers.Dense(4, name="logits")(keras.layers.Dense(16, name="hidden")(inputs))
    model = Custom(inputs, outputs)
    model.compile("adam", LOSS(from_logits=True))
    return model


def besides(model):
    kernel = model.get_layer("hidden").kernel
    kernel.assign(kernel + 0.01)


def instead(model):
    besides(model)


def test_a_train_step_that_writes_weights_besides_the_optimizer_is_detected(batches):
    model = custom_model(besides)
    with pytest.raises(LeakError, match="became non-zero.*hidden/kernel.*assign weights before the optimizer update"):
        model.fit(**batches, callbacks=[PruningCallback(AT_ONCE)])
    assert zeros(model) == expected(model, 0.5)
    expect_pristine(model)


def test_a_train_step_that_writes_weights_besides_the_optimizer_is_detected_also_after_the_schedule(batches):
    model = custom_model(besides)
    schedule = PolynomialDecay(initial_sparsity=0.5, final_sparsity=0.5, begin_step=0, end_step=0)
    with pytest.raises(LeakError, match="became non-zero.*hidden/kernel"):
        model.fit(**batches, epochs=3, callbacks=[PruningCallback(schedule)])
    assert zeros(model) == expected(model, 0.5)
    expect_pristine(model)


def test_a_train_step_that_never_uses_the_optimizer_is_detected(batches):
    model = custom_model(instead)
    with pytest.raises(LeakError, match="no update passed through"):
        model.fit(**batches, callbacks=[PruningCallback(AT_ONCE)])
    assert zeros(model) == expected(model, 0.5)
    expect_pristine(model)


def test_train_on_batch_with_an_assignment_of_the_users_is_detected(compiled, samples):
    with Pruner(compiled, AT_ONCE) as pruner:
        compiled.train_on_batch(*samples)
        kernel = compiled.get_layer("logits").kernel
        kernel.assign(kernel + 0.01)
        with pytest.raises(LeakError, match="logits/kernel.*pruner.enforce"):
            pruner.step()
        assert zeros(compiled) == expected(compiled, 0.5)


def test_a_leak_after_the_last_step_is_not_silent(compiled, samples):
    pruner = Pruner(compiled, AT_ONCE)
    compiled.train_on_batch(*samples)
    pruner.step()
    kernel = compiled.get_layer("logits").kernel
    kernel.assign(kernel + 0.01)
    with pytest.warns(UserWarning, match="pruned weights"):
        pruner.finish()
    assert zeros(compiled) == expected(compiled, 0.5)


def test_a_leak_between_two_updates_of_the_masks_is_found_long_before_the_next(compiled, samples):
    with Pruner(compiled, ConstantSparsity(0.5, frequency=1000)) as pruner:
        compiled.train_on_batch(*samples)
        kernel = compiled.get_layer("logits").kernel
        with pytest.raises(LeakError, match="logits/kernel"):
            for _ in range(20):
                compiled.train_on_batch(*samples)
                kernel.assign(kernel + 0.01)
                pruner.step()


def test_recompiling_inside_a_pruner_is_detected_and_the_model_keeps_its_new_function(compiled, samples):
    compiled.train_on_batch(*samples)
    old = compiled.train_function
    with Pruner(compiled, AT_ONCE) as pruner:
        compiled.compile("sgd", LOSS(from_logits=True))
        compiled.train_on_batch(*samples)
        with pytest.raises(LeakError, match="no update passed through Adam"):
            pruner.step()
    # The old function trains with the old optimizer.
    assert compiled.train_function is not old


# ---------------------------------------------------------------- models


def test_a_layer_used_twice_is_pruned_once(batches):
    shared = keras.layers.Dense(8, activation="tanh", name="shared")
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(4, name="logits")(shared(shared(inputs))))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS(from_logits=True))
    pruning, spy = PruningCallback(RISE), Spy()
    model.fit(**batches, epochs=2, callbacks=[pruning, spy])
    assert [target.name for target in pruning.pruner.targets] == ["shared/kernel", "logits/kernel"]
    assert zeros(model) == expected(model, 0.75)


def test_models_inside_models_hold_their_zeros(batches):
    block = keras.Sequential([keras.Input((8,)), keras.layers.Dense(12, name="dense")], name="block")
    outer = keras.Sequential([keras.Input((8,)), block, keras.layers.Dense(4, name="dense")])
    outer.compile("adam", LOSS(from_logits=True))
    spy = Spy()
    outer.fit(**batches, epochs=2, callbacks=[PruningCallback(RISE), spy])
    assert zeros(outer) == expected(outer, 0.75)
    assert len(spy.counts) == 10


def test_a_frozen_layer_is_pruned_and_not_trained_or_left_alone_but_never_half(compiled, batches):
    frozen = compiled.get_layer("hidden")
    frozen.trainable = False
    compiled.compile("adam", LOSS(from_logits=True))
    before = np.array(frozen.kernel)
    pruning = PruningCallback(RISE)
    compiled.fit(**batches, epochs=2, callbacks=[pruning])
    after = np.asarray(frozen.kernel)
    names = [target.name for target in pruning.pruner.targets]
    if "hidden/kernel" in names:
        assert np.count_nonzero(after == 0) == round(0.75 * after.size)
        np.testing.assert_array_equal(after[after != 0], before[after != 0])
    else:
        assert any(skipped.name.startswith("hidden") for skipped in pruning.pruner.skipped)
        np.testing.assert_array_equal(after, before)


class TwoPlayers(keras.Model):
    """Two models with an optimizer each, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((8,)), keras.layers.Dense(12, name="maker_dense")])
        self.judge = keras.Sequential([keras.Input((12,)), keras.layers.Dense(1, name="judge_dense")])
        self.build((None, 8))

    def build(self, shape):
        self.built = True

    def call(self, x, training=False):
        return self.judge(self.maker(x, training=training), training=training)

    def compile(self, maker_optimizer, judge_optimizer):
        super().compile(loss="mse")
        self.maker_optimizer, self.judge_optimizer = maker_optimizer, judge_optimizer

    def train_step(self, data):
        for player, optimizer, sign in (
            (self.judge, self.judge_optimizer, 1.0),
            (self.maker, self.maker_optimizer, -1.0),
        ):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(tf.square(self(data[0], training=True) - 1.0))
            optimizer.apply(tape.gradient(loss, player.trainable_variables), player.trainable_variables)
        return {"loss": loss}


def test_two_optimizers_in_one_train_step_both_hold_zeros(batches):
    model = TwoPlayers()
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.01, momentum=0.9)]
    model.compile(*optimizers)
    pruning, spy = PruningCallback(RISE), Spy()
    model.fit(**batches, epochs=2, callbacks=[pruning, spy])
    assert zeros(model) == expected(model, 0.75)
    for optimizer, player in zip(optimizers, (model.maker, model.judge), strict=True):
        kernel = np.asarray(player.layers[0].kernel)
        slots = [np.asarray(v) for v in optimizer.variables if tuple(v.shape) == kernel.shape]
        assert slots and not any(np.any(slot[kernel == 0]) for slot in slots)
    expect_pristine(model, optimizers)


# These divide by something that is made of gradients or weights.
DIVIDERS = ["Adafactor", "Ftrl", "Adagrad", "Adadelta", "Lamb", "Muon"]


class Shifted(keras.constraints.Constraint):
    """A constraint of the user's that makes non-zeros out of zeros."""

    def __call__(self, w):
        return w + 0.01


@pytest.mark.parametrize(
    "constraint",
    [Shifted(), keras.constraints.MaxNorm(0.5), keras.constraints.UnitNorm()],
    ids=lambda c: type(c).__name__,
)
@pytest.mark.parametrize("use_ema", [False, True])
def test_a_constraint_of_the_users_acts_and_zeros_hold(compiled, batches, constraint, use_ema):
    kernel = compiled.get_layer("hidden").kernel
    kernel.constraint = constraint
    compiled.compile(
        keras.optimizers.SGD(0.05, use_ema=use_ema, ema_overwrite_frequency=2 if use_ema else None), LOSS(True)
    )
    spy = Spy()
    compiled.fit(**batches, epochs=2, callbacks=[PruningCallback(RISE), spy])
    assert kernel.constraint is constraint
    assert zeros(compiled) == expected(compiled, 0.75)
    if isinstance(constraint, keras.constraints.MaxNorm) and not use_ema:
        assert np.linalg.norm(np.asarray(kernel), axis=0).max() <= 0.5 + 1e-6


@pytest.mark.parametrize("optimizer", [getattr(keras.optimizers, name) for name in DIVIDERS], ids=DIVIDERS)
def test_whole_rows_and_columns_that_are_pruned_at_once_do_not_become_nan(compiled, batches, optimizer):
    hidden = compiled.get_layer("hidden")
    kernel = np.array(hidden.kernel)
    kernel[2:, :] /= 100
    kernel[:, 3:] /= 100
    hidden.kernel.assign(kernel)
    hidden.kernel.constraint = keras.constraints.MaxNorm(2.0)
    compiled.compile(optimizer(), LOSS(from_logits=True))
    pruning = PruningCallback(ConstantSparsity(0.95), include="hidden")
    compiled.fit(**batches, epochs=3, callbacks=[pruning])
    assert [np.count_nonzero(~mask) for mask in pruning.pruner.masks.values()] == expected(compiled, 0.95)[:1]
    assert not any(pruning.pruner.audit().values())
    assert all(np.isfinite(np.asarray(v)).all() for v in [*compiled.variables, *compiled.optimizer.variables])
    compiled.fit(**batches)
    assert all(np.isfinite(np.asarray(v)).all() for v in [*compiled.variables, *compiled.optimizer.variables])


def test_weights_that_become_nan_in_fit_are_named(compiled, batches):
    class Poison(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                compiled.get_layer("hidden").kernel.assign(np.full((8, 16), np.nan))

    with pytest.raises(ValueError, match=r"hidden/kernel \(\d+\).*lower the learning rate"):
        compiled.fit(**batches, callbacks=[PruningCallback(AT_ONCE), Poison()])
    expect_pristine(compiled)


# ---------------------------------------------------------------- several trainings


def test_a_recompile_between_two_fits_goes_on_with_the_schedule(compiled, batches):
    pruning = PruningCallback(PolynomialDecay(0.2, 0.75, begin_step=0, end_step=12, frequency=3))
    with pytest.warns(UserWarning, match="lands on sparsity 0.75 at step 12"):
        compiled.fit(**batches, callbacks=[pruning])
    assert pruning.pruner.step_count == 5
    first = compiled.optimizer
    compiled.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS(from_logits=True))
    spy = Spy()
    compiled.fit(**batches, epochs=2, callbacks=[pruning, spy])
    assert pruning.pruner.step_count == 15
    assert zeros(compiled) == expected(compiled, 0.75)
    expect_pristine(compiled, [first, compiled.optimizer])


def test_dense_weights_set_between_two_fits_are_pruned_again_when_the_second_begins(compiled, batches):
    dense = compiled.get_weights()
    pruning, spy = PruningCallback(RISE), Spy()
    compiled.fit(**batches, epochs=2, callbacks=[pruning])
    compiled.set_weights(dense)
    assert zeros(compiled) == [0, 0]
    compiled.fit(**batches, callbacks=[pruning, spy])
    assert all(count == expected(compiled, 0.75) for count in spy.counts)
    assert zeros(compiled) == expected(compiled, 0.75)


def test_predict_and_evaluate_change_no_weight(compiled, samples, batches):
    # A leak that nothing has seen yet: evaluating must not repair it either.
    pruning = PruningCallback(AT_ONCE)
    compiled.fit(**batches, callbacks=[pruning])
    with Pruner(compiled, AT_ONCE) as pruner:
        compiled.get_layer("logits").kernel.assign(np.full((16, 4), 0.25))
        before = [np.array(v) for v in [*compiled.variables, *compiled.optimizer.variables]]
        compiled.predict(samples[0], verbose=0)
        compiled.evaluate(*samples, verbose=0)
        compiled.evaluate(*samples, verbose=0, callbacks=[pruning])
        compiled.test_on_batch(*samples)
        compiled(samples[0], training=False)
        for was, variable in zip(before, [*compiled.variables, *compiled.optimizer.variables], strict=True):
            np.testing.assert_array_equal(was, np.asarray(variable))
        pruner.enforce()


def test_a_callback_that_builds_the_train_function_anew_is_obeyed(compiled, batches):
    class Unfreeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.scale = 0.0
                self.model.make_train_function(force=True)

    class Scaled(keras.Model):
        scale = 1.0

        def compute_loss(self, *arguments, **keywords):
            return self.scale * super().compute_loss(*arguments, **keywords)

    inputs = keras.Input((8,))
    model = Scaled(inputs, keras.layers.Dense(4, name="logits")(inputs))
    model.compile(keras.optimizers.SGD(0.1), LOSS(from_logits=True))

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.kept = [*getattr(self, "kept", []), kernels(self.model)[0].copy()]

    keep = Keep()
    model.fit(**batches, epochs=2, callbacks=[PruningCallback(AT_ONCE), Unfreeze(), keep])
    np.testing.assert_array_equal(keep.kept[0], keep.kept[1])
