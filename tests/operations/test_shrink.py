"""pk.shrink: targets, ranking, limits, what may shrink, repair, and the training that goes on."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, randomize
from keras import layers
from networks import sequential
from removed_channels import arrays, difference, small_cnn

import prunekit as pk

TOLERANCE = 0.02


def cnn(width=24):
    model = small_cnn(width)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(96, 12, 12, 3)).astype("float32"), rng.integers(0, 5, 96)


def sizes(model):
    return {layer.name: layer.output.shape[-1] for layer in model.layers if layer.weights}


@pytest.mark.every_backend
@pytest.mark.parametrize("allocation", ["uniform", "per_kind", "global"])
def test_half_of_the_channels_are_left(allocation):
    smaller, report = pk.shrink(cnn(), channels=0.5, allocation=allocation)
    assert report.channels == (96, 48)
    assert sum(sizes(smaller).values()) == 48 + 5
    if allocation == "uniform":
        assert sizes(smaller) == {"one": 12, "two": 16, "hidden": 20, "logits": 5}


@pytest.mark.parametrize("target", ["parameters", "macs"])
@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2", "transformer_encoder", "lstm_stack", "densenet"])
@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_budget_is_reached_within_two_percent(target, name, allocation):
    model = randomize(ARCHITECTURES[name]())
    share = 0.6
    if name == "lstm_stack":
        # One of its 20 units is 7 % of the multiply-accumulates.
        share = {"parameters": 0.6, "macs": 0.58}[target]
    smaller, report = pk.shrink(model, **{target: share}, criterion="l2", allocation=allocation)
    before, after = getattr(report, target)
    assert abs(after / before - share) <= TOLERANCE * share
    real = {"parameters": smaller.count_params, "macs": lambda: pk.cost(smaller).macs}[target]
    assert real() == after


def test_a_budget_that_cannot_be_reached_names_the_range():
    with pytest.raises(
        ValueError,
        match=r"^parameters=0.001 cannot be reached .*: pass parameters=0.0\d+. The reachable range is 0.0\d+ to 1",
    ):
        pk.shrink(cnn(), parameters=0.001)
    with pytest.raises(ValueError, match=r"channels=0.01.*range is 0.\d+ to 1"):
        pk.shrink(cnn(), channels=0.01)


def test_the_least_important_channels_go_and_their_indices_are_reported():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, name="one"), layers.Dense(2, name="two")])
    scale = np.array([3.0, 1.0, 4.0, 2.0, 6.0, 5.0])
    model.get_layer("one").kernel.assign(np.ones((4, 6)) * scale)
    model.get_layer("two").kernel.assign(np.ones((6, 2)))
    _, report = pk.shrink(model, channels=0.5, criterion="magnitude")
    assert report.groups[0].kept == (2, 4, 5)
    np.testing.assert_array_equal(report.kept["one/kernel"][1], [2, 4, 5])
    np.testing.assert_array_equal(report.kept["two/kernel"][0], [2, 4, 5])


def test_importances_are_means_over_all_weights_of_a_channel():
    model = randomize(keras.Sequential([keras.Input((4,)), layers.Dense(6, name="one"), layers.Dense(2, name="two")]))
    one, two = (np.abs(np.array(layer.kernel)) for layer in model.layers)
    both = one.mean(0) / one.mean() + two.mean(1) / two.mean()
    _, report = pk.shrink(model, channels=0.5, criterion="magnitude")
    assert report.groups[0].kept == tuple(np.sort(np.argsort(both)[3:]))
    plain = np.maximum(one.mean(0), two.mean(1))
    _, report = pk.shrink(model, channels=0.5, criterion="magnitude", reduction="max", normalize=False)
    assert report.groups[0].kept == tuple(np.sort(np.argsort(plain)[3:]))


def test_a_multiple_that_removes_nothing_is_said():
    _, report = pk.shrink(cnn(), channels=0.5, multiple=64)
    assert report.channels[0] == report.channels[1]
    assert [note for note in report.notes if "multiple" in note] == [
        "No channel is removed: the kept channels of each group, rounded up to a multiple of 64, are all it has. Pass "
        "a smaller `multiple`."
    ]


def test_a_size_without_a_name_is_refused_with_the_names():
    with pytest.raises(TypeError, match=r"pass one of channels, parameters, .*pk\.shrink\(model, channels=0\.5\)"):
        pk.shrink(cnn(), 0.5)


def test_kept_channels_are_rounded_up_to_a_multiple_and_this_is_said():
    smaller, report = pk.shrink(cnn(), channels=0.55, multiple=8)
    assert all(size % 8 == 0 for name, size in sizes(smaller).items() if name != "logits")
    assert report.channels[1] >= 0.55 * report.channels[0] - 1
    assert any("rounded up to a multiple of 8" in note for note in report.notes)


@pytest.mark.parametrize(("share", "options"), [(0.3, {"multiple": 8}), (0.01, {"tolerance": None, "minimum": 8})])
def test_a_target_that_is_missed_is_noted(share, options):
    _, report = pk.shrink(cnn(), parameters=share, **options)
    before, after = report.parameters
    assert abs(after / before - share) > 0.02 * share
    assert f"parameters={share} is not reached within 2%: {after / before:.3f} is left." in report.notes


def test_each_group_keeps_the_minimum():
    smaller, _ = pk.shrink(cnn(), channels=0.2, minimum=5, allocation="global")
    assert min(sizes(smaller).values()) >= 5


def test_excluded_layers_stay_and_are_named():
    smaller, report = pk.shrink(cnn(), channels=0.5, exclude="one", allocation="uniform")
    assert sizes(smaller) == {"one": 24, "two": 16, "hidden": 20, "logits": 5}
    assert [group.reason for group in report.groups] == ["excluded by 'one'", "", ""]
    smaller, report = pk.shrink(cnn(), channels=0.5, include=["one"], allocation="uniform")
    assert sizes(smaller) == {"one": 12, "two": 32, "hidden": 40, "logits": 5}
    assert report.groups[1].reason == "not matched by include"


def test_a_residual_group_stays_if_one_of_its_layers_is_excluded():
    model = ARCHITECTURES["resnet20"]()
    _, report = pk.shrink(model, channels=0.5, criterion="l2", exclude="stage0_block1_second")
    stem = next(group for group in report.groups if group.name == "stem")
    assert stem.before == stem.after and "excluded" in stem.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "One target says how small"),
        ({"channels": 0.5, "macs": 0.5}, "Received: channels, macs"),
        ({"channels": 50}, "pass channels=0.5208"),
        ({"channels": 0}, "above 0"),
        ({"channels": 0.5, "reduction": "median"}, "mean, sum, max"),
        ({"channels": 0.5, "allocation": "erk"}, "uniform, per_kind, global"),
        ({"channels": 0.5, "repair": "all"}, "none, outputs, weights"),
        ({"channels": 0.5, "criterion": "wanda"}, "needs|data"),
        ({"channels": 0.5, "criterion": "movement"}, "needs a training"),
        ({"channels": 0.5, "criterion": "synflow"}, "rounds"),
        ({"channels": 0.5, "include": "thre"}, "'thre'"),
        ({"channels": 0.5, "exclude": ["one", "two", "hidden"]}, "no channels that can be removed"),
        ({"channels": 0.5, "minimum": 0}, "minimum"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        pk.shrink(cnn(), **options)
    assert "\n" not in str(caught.value)


def test_a_model_without_removable_channels_is_refused_with_the_reasons():
    with pytest.raises(ValueError, match="LayerNormalization subtracts the mean"):
        pk.shrink(ARCHITECTURES["layer_norm_mlp"](), channels=0.5)


CRITERIA = ["magnitude", "l2", "random", "wanda", "output_error", "taylor", "fisher", "apoz", "geometric_median"]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_ranks_channels(criterion, data):
    smaller, report = pk.shrink(cnn(), channels=0.5, criterion=criterion, data=data, repair="none")
    assert report.channels == (96, 48) and not report.errors
    assert np.isfinite(arrays(smaller(data[0][:4]))[0]).all()


# ---- repair ----------------------------------------------------------------------------------------------------------


def redundant():
    """A network in which half of the channels are sums of the others, so that their removal costs nothing."""
    model = randomize(cnn(16))
    kernel = np.array(model.get_layer("one").kernel)
    kernel[..., 8:] = 0.5 * kernel[..., :8]
    model.get_layer("one").kernel.assign(kernel)
    bias = np.array(model.get_layer("one").bias)
    bias[8:] = 0.5 * bias[:8]
    model.get_layer("one").bias.assign(bias)
    return model


def test_least_squares_recovers_what_the_kept_channels_can_say(data):
    model = redundant()
    wanted = arrays(model(data[0]))
    plain, _ = pk.shrink(model, channels=0.5, include=["one"], repair="none")
    repaired, report = pk.shrink(model, channels=0.5, include=["one"], data=data)
    assert difference(wanted, arrays(plain(data[0]))) > 0.1
    assert difference(wanted, arrays(repaired(data[0]))) < 0.02
    error = next(error for error in report.errors if error.weight == "two/kernel")
    assert error.after < 1e-3 < error.before


@pytest.mark.parametrize("repair", ["outputs", "weights"])
@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2", "grouped", "transformer_encoder", "lstm_stack"])
def test_a_repair_makes_the_error_of_the_layers_smaller(name, repair):
    from architectures import inputs_of

    model = randomize(ARCHITECTURES[name]())
    inputs = inputs_of(model, seed=3, examples=32)
    _, report = pk.shrink(model, channels=0.7, data=inputs, repair=repair)
    # Squared errors below those of the rounding of float32 are none.
    assert report.errors and all(error.after <= error.before * 1.01 + 1e-14 for error in report.errors)
    assert sum(error.after for error in report.errors) < sum(error.before for error in report.errors)


@pytest.mark.parametrize("repair", ["outputs", "weights"])
def test_a_repair_keeps_the_zeros_of_an_earlier_pruning(repair, data):
    model = redundant()
    pk.prune(model, 0.6, allocation="uniform")
    smaller, report = pk.shrink(model, channels=0.5, data=data, repair=repair)
    for layer in ("one", "two", "hidden"):
        former, kept = np.array(model.get_layer(layer).kernel), report.kept[f"{layer}/kernel"]
        for axis, indices in kept.items():
            former = np.take(former, indices, axis)
        assert not np.array(smaller.get_layer(layer).kernel)[former == 0].any()
    assert all(error.after <= error.before * 1.01 for error in report.errors)


def test_labels_are_not_read_by_a_repair(data):
    first, _ = pk.shrink(redundant_once := redundant(), channels=0.5, data=data)
    second, _ = pk.shrink(redundant_once, channels=0.5, data=data[0])
    assert difference(arrays(first(data[0])), arrays(second(data[0]))) == 0


def test_an_interrupted_repair_leaves_the_model_as_it_was(data):
    model = redundant()
    before = model.get_weights()

    def interrupt(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pk.shrink(model, channels=0.5, data=data, progress=interrupt)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_data_that_do_not_fit_the_model_are_refused_in_one_line(data):
    with pytest.raises(ValueError, match=r"input is \(None, 12, 12, 3\), with the batch first. Received: .*\(64, 9, 9"):
        pk.shrink(cnn(), channels=0.5, data=np.zeros((96, 9, 9, 3), "float32"))
    with pytest.raises(ValueError, match=r"The shape of the input .*\(64, 9, 9, 3\)"):
        pk.prune(cnn(), 0.5, np.zeros((96, 9, 9, 3), "float32"), criterion="magnitude", allocation="uniform")
    model = ARCHITECTURES["two_towers"]()
    first, second = (np.zeros((8, *one.shape[1:]), "float32") for one in model.inputs)
    with pytest.raises(ValueError, match=r"Received: 1 in the calibration data. Pass several inputs as a dictionary"):
        pk.shrink(model, channels=0.5, data=[first, second])
    _, report = pk.shrink(model, channels=0.5, data=([first, second], None))
    assert report.errors


# ---- training goes on ------------------------------------------------------------------------------------------------


def test_compile_settings_carry_over_and_metrics_are_the_new_models_own(data):
    model = cnn()
    smaller, _ = pk.shrink(model, channels=0.5)
    assert smaller.compiled and type(smaller.optimizer) is type(model.optimizer)
    assert smaller.optimizer is not model.optimizer
    smaller.fit(*data, verbose=0)
    assert set(smaller.evaluate(*data, return_dict=True, verbose=0)) == {"loss", "accuracy"}


@pytest.mark.every_backend
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop", "adamw", "lion", "ftrl", "adafactor"])
def test_the_optimizer_s_state_is_cut_with_the_weights(optimizer, data):
    model = cnn()
    chosen = keras.optimizers.SGD(0.01, momentum=0.9) if optimizer == "sgd" else optimizer
    model.compile(chosen, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*data, verbose=0, epochs=2)
    smaller, report = pk.shrink(model, channels=0.5, repair="none")
    old, new = model.optimizer, smaller.optimizer
    assert int(new.iterations) == int(old.iterations)
    kept = report.kept["one/kernel"][3]
    compared = 0
    for one, other in zip(old.variables, new.variables, strict=True):
        if tuple(one.shape) == (3, 3, 3, 24):
            np.testing.assert_array_equal(np.array(one)[..., kept], np.array(other))
            compared += 1
    assert compared or optimizer == "adafactor"
    assert bool(report.notes) == (optimizer == "adafactor")


def test_training_goes_on_without_a_jump(data):
    """With Adam's moments cut along, the first updates of the smaller model are of the size that they had."""
    model = cnn()
    model.fit(*data, epochs=20, verbose=0)

    def first_update(model):
        before = [np.array(one) for one in model.trainable_variables]
        model.train_on_batch(*data)
        after = [np.array(one) for one in model.trainable_variables]
        return np.sqrt(sum(np.square(one - other).sum() for one, other in zip(before, after, strict=True)))

    smaller, _ = pk.shrink(model, channels=0.9)
    fresh, _ = pk.shrink(model, channels=0.9)
    fresh.compile("adam", fresh.loss)
    carried, anew = first_update(smaller), first_update(fresh)
    assert carried < 0.7 * anew


def test_a_report_has_sections_and_json(data):
    import json

    _, report = pk.shrink(redundant(), channels=0.5, data=data)
    assert json.loads(json.dumps(report.to_dict()))["groups"][0]["after"] == 8
    titles = [section.title for section in report.sections()]
    assert titles == [
        "Groups of channels",
        "Channels that stay",
        "Chosen for auto",
        "On the data",
        "Errors of the layers",
    ]
    assert "one: 16 -> 8 channels" in str(report)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (dict(channels=48), r"To keep 48 of the model's 96 removable channels, pass channels=0\.5\.$"),
        (dict(parameters=1000), r"To keep 1000 of the model's [\d,]+ parameters, pass parameters=0\.\d+\.$"),
        (dict(macs=50), r"For 50 %, pass 0\.5; for a count, pass its share of all macs\.$"),
        (dict(channels=2.5), r"Received: channels=2\.5\. For 2\.5 %, pass 0\.025\.$"),
    ],
)
def test_a_count_is_answered_with_the_share_that_it_would_be(target, message):
    with pytest.raises(ValueError, match=message):
        pk.shrink(cnn(), **target)


def test_a_quantized_model_is_repaired_before_its_quantization_or_not_at_all(data):
    model = cnn()
    pk.quantize(model, data[0])
    before = model.get_weights()
    for change in (
        lambda: pk.shrink(model, channels=0.5, data=data),
        lambda: pk.shrink(model, channels=0.5, repair="weights"),
        lambda: pk.prune(model, 0.5, data),
        lambda: pk.prune(model, 0.5, repair="outputs"),
    ):
        with pytest.raises(ValueError, match=r"put one/kernel, two/kernel, hidden/kernel and 1 more on grids"):
            change()
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))
    _, report = pk.shrink(model, channels=0.5, data=data, repair="none")
    assert any("Call pk.quantize on the smaller model" in note for note in report.notes)
    # A weight that was trained since is free.
    for weight in model.trainable_weights:
        weight.assign(weight + 0.123 * keras.random.normal(weight.shape, seed=1))
    assert pk.shrink(model, channels=0.5, data=data)[1].channels == (96, 48)


def test_zeros_lie_on_grids_so_that_a_quantized_model_is_pruned_without_repair(data):
    model = cnn()
    quantized = pk.quantize(model, data[0])
    assert pk.prune(model, 0.5).target_sparsity == pytest.approx(0.5, abs=1e-3)
    quantized.state.check_unchanged()
    with pytest.raises(ValueError, match="on grids"):
        pk.prune(model, 0.6, data)


@pytest.mark.every_backend
def test_weights_that_are_replaced_anyway_are_not_drawn(monkeypatch):
    model = sequential((8,), keras.layers.Dense(6, kernel_initializer="he_normal"), keras.layers.Dense(2))
    drawn, call = [], keras.initializers.VarianceScaling.__call__
    monkeypatch.setattr(
        keras.initializers.VarianceScaling, "__call__", lambda *args, **kwargs: drawn.append(1) or call(*args, **kwargs)
    )
    smaller, _ = pk.shrink(model, channels=0.5)
    assert not drawn
    kinds = [type(layer.kernel_initializer).__name__ for layer in smaller.layers]
    assert kinds == ["HeNormal", "GlorotUniform"]
    assert all(kernel.any() for kernel in smaller.get_weights()[::2])
