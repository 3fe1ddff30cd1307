"""Wrapped models of tensorflow-model-optimization, read in the middle of their training."""

import json

import keras
import legacy_models as old
import numpy as np
import pytest
from keras import ops
from legacy_models import L, answers, images_and_labels, keras2, saved, tfmot, their_noise

import prunekit as pk
from prunekit.interop.tfmot import read_model

sparsity = tfmot.sparsity.keras
SCHEDULE = pk.schedules.PolynomialDecay(0.2, 0.8, 0, 20, frequency=5)


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A pruned network after 8 of 20 steps, and its three files."""
    return old.saved_halfway(tmp_path_factory.mktemp("halfway"))


# ---------------------------------------------------------------- pruned


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("kind", old.FORMATS)
def test_masks_step_and_thresholds_are_those_of_the_wrappers(halfway, kind):
    model, files = halfway
    expected, (step,) = old.pruning_state(model)
    converted = read_model(files[kind])
    assert converted.step == step == 8
    assert converted.masks.keys() == converted.thresholds.keys() == expected.keys()
    for name, (weight, mask, threshold) in expected.items():
        np.testing.assert_array_equal(converted.masks[name], mask)
        assert converted.thresholds[name] == threshold
        layer, attribute = name.split("/")
        kernel = ops.convert_to_numpy(getattr(converted.model.get_layer(layer), attribute))
        np.testing.assert_array_equal(kernel, np.where(mask, weight, 0))
    assert set(converted.schedules.values()) == {SCHEDULE}
    np.testing.assert_allclose(answers(converted.model), answers(model), atol=1e-6)


def test_weights_that_the_last_update_made_dense_again_are_zero(tmp_path):
    model = old.pruned_halfway(old.dense_network)
    wrapper = model.get_layer("prune_low_magnitude_classes")
    ((weight, mask, _),) = wrapper.pruning_vars
    weight.assign_add(0.01 * (1.0 - mask))
    converted = read_model(saved(model, tmp_path, "dense.h5"))
    kernel = ops.convert_to_numpy(converted.model.get_layer("classes").kernel)
    assert (weight.numpy() != 0).all()
    np.testing.assert_array_equal(kernel == 0, mask.numpy() == 0)


@pytest.mark.parametrize(("optimizer", "kind"), [("Adam", "h5"), ("SGD", "savedmodel"), ("RMSprop", "keras")])
@pytest.mark.short(cases=2)
def test_the_optimizer_comes_with_its_slots_and_its_count(optimizer, kind, tmp_path):
    settings = {"SGD": {"momentum": 0.9, "nesterov": True}, "RMSprop": {"momentum": 0.5, "centered": True}}
    theirs = getattr(keras2.optimizers, optimizer)(0.01, **settings.get(optimizer, {}), clipnorm=2.0)
    model = old.pruned_halfway(old.dense_network, theirs)
    converted = read_model(saved(model, tmp_path, old.FORMATS[kind]))
    ours = converted.optimizer
    assert int(ours.iterations) == 8 and ours.clipnorm == 2.0 and float(ours.learning_rate) == pytest.approx(0.01)
    assert converted.model.optimizer is ours and not any("optimizer" in line for line in converted.not_carried)
    names = {"Adam": ["_momentums", "_velocities"], "SGD": ["momentums"]}
    for name in names.get(optimizer, ["_velocities", "_momentums", "_average_gradients"]):
        for one, other in zip(getattr(theirs, name), getattr(ours, name), strict=True):
            np.testing.assert_array_equal(one.numpy(), ops.convert_to_numpy(other))


def test_the_next_update_of_a_converted_model_is_the_one_that_tf_keras_makes(tmp_path):
    """Slots, learning rate and count in one number: the same batch, without pruning, in both libraries."""
    model = old.trained(old.small_network(), epochs=2)
    converted = read_model(saved(model, tmp_path, "plain.keras"))
    x, y = images_and_labels(16, seed=8)
    model.train_on_batch(x, y)
    converted.model.train_on_batch(x, y)
    np.testing.assert_allclose(answers(model), answers(converted.model), atol=1e-5)
    assert converted.not_carried == ()


@pytest.mark.parametrize("kind", old.FORMATS)
def test_training_continues_at_that_sparsity_and_step_and_ends_on_the_schedule(halfway, kind):
    converted = read_model(halfway[1][kind])
    before = converted.sparsity
    callback = converted.callback()
    seen = {}

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.setdefault(callback.pruner.step_count, callback.pruner.sparsity)

    x, y = images_and_labels(48)
    converted.model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback, Watch()])
    # Theirs keeps round(n (1 - s)) weights, so the two counts of a weight differ by one at most.
    assert min(seen) == 8 and seen[8] == pytest.approx(before, abs=2 / 300)
    assert before == pytest.approx(SCHEDULE(5), abs=0.01)
    assert [step for step in sorted(seen) if step - 1 in seen and seen[step] > seen[step - 1]] == [10, 15]
    assert callback.pruner.step_count == 20 and int(converted.model.optimizer.iterations) == 20
    assert callback.pruner.sparsity == pytest.approx(0.8, abs=1 / 300)
    for name, mask in converted.masks.items():
        assert not (callback.pruner.masks[name] & ~mask).any(), "a pruned weight came back"
    assert callback.pruner.audit() == dict.fromkeys(converted.masks, 0)


def test_training_continues_with_another_optimizer_at_the_same_step(halfway):
    converted = read_model(halfway[1]["h5"])
    converted.model.compile("sgd", "sparse_categorical_crossentropy")
    callback = converted.callback(criterion="random")
    assert callback.options.origin == -8
    x, y = images_and_labels(48)
    converted.model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
    assert callback.pruner.step_count == 20 and int(converted.model.optimizer.iterations) == 12
    assert callback.pruner.sparsity == pytest.approx(0.8, abs=1 / 300)


def test_blocks_and_schedules_of_single_layers_come_with_the_weights(tmp_path):
    def wrap(layer):
        if layer.name == "hidden":
            schedule = sparsity.ConstantSparsity(0.5, 0, frequency=1)
            return old.wrapped_for_pruning(
                layer, pruning_schedule=schedule, block_size=(4, 1), block_pooling_type="MAX"
            )
        return old.wrapped_for_pruning(layer) if layer.name == "out" else layer

    layers = [L.Dense(8, name="hidden"), L.Dense(8, name="between"), L.Dense(6, name="out")]
    plain = keras2.Sequential([keras2.Input((8, 8, 1)), L.Flatten(name="flatten"), *layers], name="mixed")
    model = keras2.models.clone_model(plain, clone_function=wrap)
    converted = read_model(saved(old.trained(model, [sparsity.UpdatePruningStep()]), tmp_path, "mixed.h5"))
    assert converted.schedules == {
        "hidden/kernel": pk.schedules.ConstantSparsity(0.5, 0, frequency=1),
        "out/kernel": SCHEDULE,
    }
    assert converted.patterns == {
        "hidden/kernel": pk.patterns.Block(4, 1, "max"),
        "out/kernel": pk.patterns.Unstructured(),
    }
    blocks = converted.masks["hidden/kernel"].reshape(16, 4, 8)
    np.testing.assert_array_equal(blocks.all(axis=1), blocks.any(axis=1))
    with pytest.raises(ValueError, match="A callback has one schedule and one pattern.*Make a callback for each"):
        converted.callback()
    both = [converted.callback("hidden/kernel"), converted.callback("out/kernel")]
    x, y = images_and_labels(48)
    converted.model.fit(x, y, batch_size=4, verbose=0, callbacks=both)
    assert [one.pruner.sparsity for one in both] == [0.5, pytest.approx(0.8, abs=0.02)]


@pytest.mark.thorough
def test_recurrent_embedding_and_attention_weights_have_their_masks(tmp_path):
    inputs = keras2.Input((6,), name="tokens")
    x = L.Embedding(12, 8, name="embedding")(inputs)
    x = L.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = L.LSTM(5, return_sequences=True, name="lstm")(x)
    x = L.GRU(4, name="gru")(x)
    plain = keras2.Model(inputs, L.Dense(6, name="out")(x), name="sequences")
    model = old.wrapped_for_pruning(plain, pruning_schedule=sparsity.ConstantSparsity(0.5, 0, frequency=1))
    with their_noise():
        model.compile("adam", "mse")
        data = np.random.default_rng(2).integers(0, 12, (8, 6)), np.zeros((8, 6))
        model.fit(*data, batch_size=4, verbose=0, callbacks=[sparsity.UpdatePruningStep()])
    # Attention's four masks have one name, so tf_keras cannot save them as .h5.
    converted = read_model(saved(model, tmp_path, "sequences.keras"))
    parts = ["query", "key", "value", "attention_output"]
    assert converted.masks.keys() == {
        "embedding/embeddings", "lstm/kernel", "lstm/recurrent_kernel", "gru/kernel", "gru/recurrent_kernel",
        "out/kernel", *(f"attention/{part}/kernel" for part in parts),
    }  # fmt: skip
    expected = {}
    for layer in model.layers:
        for weight, mask, _ in getattr(layer, "pruning_vars", ()):
            expected[weight.name] = mask.numpy().astype(bool)
    assert sorted(m.sum() for m in expected.values()) == sorted(m.sum() for m in converted.masks.values())
    assert converted.step == 2 and converted.sparsity == pytest.approx(0.5, abs=0.01)


def test_a_layer_that_counted_other_steps_is_named(tmp_path):
    inputs = keras2.Input((8, 8, 1))
    twice = old.wrapped_for_pruning(L.Dense(4, name="twice"))
    rest = [old.wrapped_for_pruning(L.Dense(6, name=f"out_{i}")) for i in range(2)]
    x = L.Flatten()(inputs)
    x = L.Concatenate()([twice(x), twice(L.ReLU()(x))])
    model = keras2.Model(inputs, L.Average()([rest[0](x), rest[1](x)]), name="uneven")
    old.trained(model, [sparsity.UpdatePruningStep()])
    converted = read_model(saved(model, tmp_path, "uneven.h5"))
    assert converted.step == 8
    assert "the step of 'twice': it counted 16 forward passes, the others 8" in converted.not_carried


def test_asking_for_a_callback_without_pruned_weights_or_with_a_wrong_name_is_refused(halfway):
    converted = read_model(halfway[1]["h5"])
    with pytest.raises(ValueError, match=r"weights that were pruned: conv/kernel, .*Received: conv/bias"):
        converted.callback("conv/bias")
    plain = read_model(keras2.Sequential([keras2.Input((4,)), L.Dense(2)]))
    with pytest.raises(ValueError, match="none in this model"):
        plain.callback()


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras2.optimizers.legacy.Adam(), "the optimizer Adam: it is one of tf_keras.optimizers.legacy"),
        (lambda: keras2.optimizers.Ftrl(), "the optimizer Ftrl: only"),
        (
            lambda: keras2.mixed_precision.LossScaleOptimizer(keras2.optimizers.SGD(0.1)),
            "the optimizer LossScaleOptimizerV3: only",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_carried_is_named(optimizer, words, tmp_path):
    converted = read_model(saved(old.trained(old.dense_network(), optimizer=optimizer()), tmp_path, "model.h5"))
    assert converted.optimizer is None and any(words in line for line in converted.not_carried)


def test_a_learning_rate_schedule_and_a_configured_loss_are_carried(tmp_path):
    model = old.dense_network()
    rate = keras2.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)
    loss = keras2.losses.SparseCategoricalCrossentropy(from_logits=True)
    with their_noise():
        model.compile(keras2.optimizers.AdamW(rate, weight_decay=0.01), loss, metrics=["accuracy"])
        model.fit(*images_and_labels(8), batch_size=4, verbose=0)
    converted = read_model(saved(model, tmp_path, "model.keras"))
    ours = converted.optimizer
    assert float(ours.learning_rate) == pytest.approx(0.1 * 0.9 ** (2 / 100)) and ours.weight_decay == 0.01
    assert converted.model.loss.get_config()["from_logits"] is True
    assert converted.not_carried == ("the metrics: name them in compile()",)


def _noted(loss, tmp_path, kind="h5", **options):
    """(what is read of a training with that loss, the loss of both libraries' next batches)."""
    model = old.dense_network()
    with their_noise():
        model.compile("sgd", loss, **options)
        model.fit(*images_and_labels(8), batch_size=4, verbose=0)
    converted = read_model(saved(model, tmp_path, old.FORMATS[kind]))
    return model, converted


@pytest.mark.parametrize("kind", old.FORMATS)
def test_a_loss_that_is_summed_stays_a_sum(kind, tmp_path):
    loss = keras2.losses.SparseCategoricalCrossentropy(reduction="sum")
    model, converted = _noted(loss, tmp_path, kind)
    batch = images_and_labels(16, seed=8)
    assert converted.model.train_on_batch(*batch) == pytest.approx(model.train_on_batch(*batch), rel=1e-5)
    assert converted.not_carried == ()


def test_a_loss_that_trains_otherwise_in_keras_3_is_named_and_nothing_is_compiled(tmp_path):
    _, converted = _noted(keras2.losses.SparseCategoricalCrossentropy(reduction="none"), tmp_path)
    assert not getattr(converted.model, "compiled", False) and converted.optimizer is not None
    assert any(
        "SparseCategoricalCrossentropy: its reduction 'none' trains differently" in one for one in converted.not_carried
    )
    _, converted = _noted("sparse_categorical_crossentropy", tmp_path, loss_weights=[3.0])
    assert not getattr(converted.model, "compiled", False)
    assert "the loss weights [3.0]: name them in compile()" in converted.not_carried


@pytest.mark.parametrize("optimizer", ["Adadelta", "Adagrad", "AdamW", "Adamax", "Lion"])
@pytest.mark.short(cases=3)
def test_every_optimizer_of_the_table_makes_the_updates_that_tf_keras_would_make_next(optimizer, tmp_path):
    model = old.trained(old.dense_network(), optimizer=getattr(keras2.optimizers, optimizer)(0.01))
    converted = read_model(saved(model, tmp_path, "model.keras"))
    assert converted.not_carried == () and int(converted.optimizer.iterations) == 8
    for seed in range(4):
        batch = images_and_labels(16, seed=seed)
        model.train_on_batch(*batch)
        converted.model.train_on_batch(*batch)
    np.testing.assert_allclose(answers(model), answers(converted.model), atol=1e-5)


# ---------------------------------------------------------------- going on by the original's rules


def test_tfmot_continues_as_the_original_does_at_every_step(tmp_path):
    """Between updates too: two forward passes lie before the next one, and masks hold in both."""
    model = old.pruned_halfway(old.dense_network, keras2.optimizers.SGD(0.05, momentum=0.9))
    converted = read_model(saved(model, tmp_path, "halfway.keras"))
    callback = converted.callback(policy="tfmot")
    assert callback.options.origin == -8
    rows = {"theirs": [], "ours": []}

    def noting(library, name, masks):
        class Note(library.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                rows[name].append((masks(), [np.array(weight) for weight in self.model.trainable_weights]))

        return Note()

    watch = noting(keras2, "theirs", lambda: {n: mask for n, (_, mask, _) in old.pruning_state(model)[0].items()})
    x, y = images_and_labels(48, seed=9)
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
    with their_noise():
        model.fit(x, y, callbacks=[sparsity.UpdatePruningStep(), watch], **fit)
    converted.model.fit(x, y, callbacks=[callback, noting(keras, "ours", lambda: callback.pruner.masks)], **fit)
    assert callback.pruner.step_count == next(iter(old.pruning_state(model)[1])) == 20
    assert [event.step for event in callback.report.events] == [10, 15, 20]
    for (expected, theirs), (masks, ours) in zip(rows["theirs"], rows["ours"], strict=True):
        assert masks.keys() == expected.keys()
        for name, mask in masks.items():
            np.testing.assert_array_equal(mask, expected[name])
        for one, other in zip(theirs, ours, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_printed_step_is_what_origin_is_made_of(halfway, run):
    """As docs/coming-from-tfmot.md has it, with what the command has printed."""
    step = json.loads(run("convert", halfway[1]["keras"], "new.keras", "--json")[1])["step"]
    x, y = images_and_labels(48)
    for policy in ("gradual", "tfmot"):
        model = keras.models.load_model("new.keras")
        origin = -step if policy == "tfmot" else int(model.optimizer.iterations) - step
        callback = pk.PruningCallback(SCHEDULE, origin=origin, policy=policy)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
        assert callback.pruner.step_count == callback.report.events[-1].step == 20
        assert callback.pruner.sparsity == pytest.approx(0.8, abs=1 / 300)


def test_m_by_n_of_a_live_model_is_its_pattern_and_continues():
    model = old.wrapped_for_pruning(
        old.dense_network(), pruning_schedule=sparsity.ConstantSparsity(0.75, 0, frequency=1), sparsity_m_by_n=(3, 4)
    )
    old.trained(model, [sparsity.UpdatePruningStep()])
    converted = read_model(model)
    assert set(converted.patterns.values()) == {pk.patterns.NM(1, 4)}
    assert any(line.startswith("the compilation: optimizer and loss of a model") for line in converted.not_carried)
    converted.model.compile("sgd", "sparse_categorical_crossentropy")
    callback = converted.callback()
    x, y = images_and_labels(16)
    converted.model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback])
    for name, mask in converted.masks.items():
        np.testing.assert_array_equal(mask.reshape(-1, 4, mask.shape[-1]).sum(axis=1), 1)
        np.testing.assert_array_equal(callback.pruner.masks[name], mask)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"run_eagerly": True, "steps_per_execution": 3}, "run_eagerly=True, steps_per_execution=3"),
        ({"jit_compile": False}, "jit_compile=False"),
        ({"run_eagerly": False, "steps_per_execution": 1}, None),
    ],
    ids=str,
)
def test_settings_of_compile_that_are_not_the_usual_ones_are_named(settings, words, tmp_path):
    model = old.dense_network()
    with their_noise():
        model.compile("sgd", "mse", **settings)
    converted = read_model(saved(model, tmp_path, "model.keras"))
    named = [line for line in converted.not_carried if line.endswith(": name them in compile()")]
    assert named == ([f"{words}: name them in compile()"] if words else [])
