"""Criteria and allocations that are tried with the repair, of which the ones with the nearest outputs are taken."""

import itertools

import keras
import numpy as np
import pytest
from keras import layers as L
from unseen_inputs import perceptron

import prunekit as pk
from prunekit.anatomy.channels.channels import find_channels
from prunekit.core.outputs.output_error import output_error
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.channels import repair, trials

pytestmark = pytest.mark.every_backend
WAYS = list(itertools.product(("l2", "output_error"), ("uniform", "global")))


def bottleneck():
    """Six units that all count, between layers half of whose units hardly do."""
    keras.utils.set_random_seed(0)
    hidden = [(24, "relu"), (6, None), (24, "relu")]
    model = keras.Sequential([keras.Input((8,)), *(L.Dense(n, activation) for n, activation in hidden), L.Dense(5)])
    few = np.where(np.arange(24) % 2, 1.0, 0.05)
    for number, scale in enumerate((few, few[:, None], few, few[:, None])):
        kernel = model.layers[number].kernel
        kernel.assign(array_of(kernel) * scale)
    return model


def inputs():
    return np.random.default_rng(1).normal(size=(300, 8)).astype("float32")


def taken(report):
    return {choice.option: choice.value for choice in report.choices}


def same(one, other):
    return all(np.array_equal(*pair) for pair in zip(one.get_weights(), other.get_weights(), strict=True))


@pytest.mark.parametrize("data", [True, False])
def test_a_bottleneck_stays(data):
    smaller, report = pk.shrink(bottleneck(), channels=0.6, data=inputs() if data else None)
    assert taken(report)["allocation"] == "global"
    assert smaller.layers[1].units == 6 and pk.shrink(bottleneck(), channels=0.6, repair="none")[0].layers[1].units < 6


def test_the_nearest_outputs_are_taken_and_the_names_make_the_same_model():
    model = perceptron()
    data = np.random.default_rng(1).normal(size=(200, 16)).astype("float32")
    wanted, errors, models = model.predict(data, verbose=0), {}, {}
    for criterion, allocation in WAYS:
        options = {"criterion": criterion, "allocation": allocation}
        models[criterion, allocation], report = pk.shrink(model, channels=0.5, data=data, **options)
        assert report.choices == ()
        found = models[criterion, allocation].predict(data, verbose=0)
        errors[criterion, allocation] = output_error([wanted], [found])
    smaller, report = pk.shrink(model, channels=0.5, data=data)
    best = min(errors, key=errors.get)
    assert taken(report) == dict(zip(("criterion", "allocation"), best, strict=True))
    assert same(smaller, models[best])
    shown = f"since its outputs are nearest: error {errors[best]:.3g}, otherwise "
    assert all(choice.reason.startswith(shown) for choice in report.choices)


def test_what_is_named_is_not_tried_otherwise():
    for options in ({"criterion": "output_error"}, {"allocation": "per_kind"}):
        report = pk.shrink(bottleneck(), channels=0.6, data=inputs(), **options)[1]
        assert not options.keys() & taken(report).keys() and len(report.choices) == 1


REASONS = {
    "nothing is repaired": ({"channels": 0.5, "repair": "none"}, "since nothing is repaired"),
    "large": ({"channels": 0.5, "data": inputs()}, "since the model has more than 100 parameters"),
}


@pytest.mark.parametrize("case", REASONS)
def test_one_selection_is_taken_where_none_is_tried(case, monkeypatch):
    monkeypatch.setattr(trials, "LARGEST", 100)
    options, reason = REASONS[case]
    told = []
    report = pk.shrink(bottleneck(), **options, progress=lambda *step: told.append(step))[1]
    assert taken(report) == {"criterion": "l2", "allocation": "uniform"}
    assert {choice.reason for choice in report.choices} == {reason}
    assert not any("trial" in text for *_, text in told)


def test_nothing_is_said_to_be_tried_where_the_weights_cannot_be_fitted(monkeypatch):
    def fail(*_):
        raise ValueError("The inputs of first/kernel are not finite.")

    monkeypatch.setattr(repair, "repaired", fail)
    report = pk.shrink(bottleneck(), channels=0.6)[1]
    assert {(one.option, one.value, one.reason) for one in report.choices} == {
        ("criterion", "l2", "since nothing is repaired"),
        ("allocation", "uniform", "since nothing is repaired"),
    }
    assert any("the weights were not fitted: The inputs of first/kernel" in note for note in report.notes)


def test_the_progress_names_the_trials():
    told = []
    pk.shrink(bottleneck(), channels=0.6, data=inputs(), progress=lambda *step: told.append(step))
    assert told[0][2].startswith("trial 1 of 4: repaired dense") and told[-1][2].startswith("trial ")
    done, totals = [step[0] for step in told], {step[1] for step in told}
    assert done == sorted(done) and done[-1] <= max(totals)


@pytest.mark.parametrize("end", [KeyboardInterrupt, None])
def test_the_given_model_stays(end):
    model = bottleneck()
    before = model.get_weights()

    def progress(done, total, text):
        if end is not None and text.startswith("trial 3"):
            raise end

    if end is None:
        pk.shrink(model, channels=0.6, data=inputs(), progress=progress)
    else:
        with pytest.raises(end):
            pk.shrink(model, channels=0.6, data=inputs(), progress=progress)
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))


def test_both_directions_of_a_recurrent_layer_keep_as_many_units():
    keras.utils.set_random_seed(0)
    both = L.Bidirectional(L.LSTM(8, return_sequences=True), name="both")
    model = keras.Sequential([keras.Input((6, 4)), both, L.GRU(8, name="gru"), L.Dense(3)])
    kernel = np.array(array_of(both.backward_layer.cell.kernel))
    both.backward_layer.cell.kernel.assign(kernel * np.tile(np.linspace(1, 100, 8), 4))
    (group, _) = find_channels(model).groups
    assert (group.name, group.parts, group.channels.size) == ("both (both directions)", 2, 16)
    smaller, report = pk.shrink(model, channels=0.5, criterion="l2", allocation="global", normalize=False)
    forward, backward = (getattr(smaller.get_layer("both"), f"{name}_layer").units for name in ("forward", "backward"))
    assert forward == backward != smaller.get_layer("gru").units
    assert smaller.predict(np.zeros((1, 6, 4)), verbose=0).shape == (1, 3)
    # Each direction keeps the units that count most in it.
    left = report.groups[0].kept
    assert [one - 8 for one in left if one >= 8] == list(range(8 - backward, 8))
