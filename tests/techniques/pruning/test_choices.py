"""What is taken for criterion="auto" and allocation="auto"."""

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import dense_network, sequential

import prunekit as pk
from prunekit.anatomy.records.reports import Choice
from prunekit.core.outputs.output_error import output_error
from prunekit.core.statistics import layer_products
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.policies import choices

pytestmark = pytest.mark.every_backend


def network():
    return dense_network(8, seed=0, hidden_0=16, hidden_1=16, head=4)


def inputs():
    return np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


def taken(report):
    return {choice.option: choice.value for choice in report.choices}


# Which one is nearer differs between the backends, whose random weights differ.
TRIED = ("layer_error", "lamp")
# Options besides the defaults, whether data are given -> criterion and allocation that are taken.
ONE_SHOT = {
    "nothing else": ({}, False, ("output_error", TRIED)),
    "no repair": ({"repair": "none"}, False, ("magnitude", "lamp")),
    "data": ({}, True, ("output_error", TRIED)),
    "data, no repair": ({"repair": "none"}, True, ("magnitude", "lamp")),
    "blocks": ({"pattern": "block:4x1"}, False, ("output_error", "erk")),
    "blocks, no repair": ({"pattern": "block:4x1", "repair": "none"}, False, ("magnitude", "erk")),
    "channels": ({"pattern": "channel"}, False, ("magnitude", "erk")),
    "blocks, data": ({"pattern": "block:4x1"}, True, ("output_error", "erk")),
    "channels, data": ({"pattern": "channel"}, True, ("magnitude", "erk")),
    "2:4, data": ({"pattern": "2:4"}, True, ("output_error", "uniform")),
    "the rules of tfmot": ({"policy": "tfmot"}, False, ("magnitude", "uniform")),
}


@pytest.mark.parametrize("case", ONE_SHOT)
def test_the_names_that_are_taken_make_the_same_model(case):
    options, data, (criterion, allocation) = ONE_SHOT[case]
    automatic, written = network(), network()
    given = inputs() if data else None
    report = pk.prune(automatic, 0.5, given, **options)
    stands_in = {} if data or options.keys() & {"repair", "policy"} else {"repair": "weights"}
    if allocation is TRIED:
        allocation = taken(report)["allocation"]
        assert allocation in TRIED
    assert taken(report) == {"criterion": criterion, "allocation": allocation} | stands_in
    again = pk.prune(written, 0.5, given, **options | taken(report))
    assert again.choices == ()
    for one, other in zip(automatic.get_weights(), written.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


ALONE = {
    "synflow": (False, "global"),
    "random": (False, "erk"),
    "l2": (False, "lamp"),
    "magnitude": (True, "layer_error"),
    "wanda": (True, "layer_error"),
}


@pytest.mark.parametrize("criterion", ALONE)
def test_an_allocation_is_chosen_for_a_criterion_that_is_named(criterion):
    data, allocation = ALONE[criterion]
    report = pk.prune(network(), 0.5, inputs() if data else None, criterion=criterion)
    assert taken(report) == {"allocation": allocation}


@pytest.mark.parametrize("policy, allocation", [("gradual", "lamp"), ("set", "erk"), ("channel_groups", "uniform")])
def test_a_training_takes_magnitudes(policy, allocation):
    model = network()
    model.compile("sgd", "mse")
    schedule = pk.schedules.ConstantSparsity(0.5, begin_step=0, end_step=3, frequency=1)
    callback = pk.PruningCallback(schedule, policy=policy)
    model.fit(inputs(), np.zeros((64, 4)), verbose=0, callbacks=[callback])
    assert taken(callback.report) == {"criterion": "magnitude", "allocation": allocation}
    assert "criterion: magnitude, " in str(callback.report)


def test_large_hessians_are_not_held_at_once(monkeypatch):
    monkeypatch.setattr(choices, "_MOST_AT_ONCE", 1000)
    report = pk.prune(network(), 0.5, inputs())
    assert taken(report) == {"criterion": "output_error", "allocation": "erk"}
    assert report.choices[1].reason == "since the Hessians of all layers have 0.0 GiB"
    assert len(report.layer_errors) == 3


def test_of_two_allocations_the_one_with_the_nearest_outputs_is_taken():
    model, data = network(), inputs()
    wanted, errors, kept = model.predict(data, verbose=0), {}, {}
    for allocation in ("layer_error", "lamp"):
        named = network()
        pk.prune(named, 0.7, data, criterion="output_error", allocation=allocation)
        errors[allocation] = output_error([wanted], [named.predict(data, verbose=0)])
        kept[allocation] = named.get_weights()
    report = pk.prune(model, 0.7, data)
    best, other = sorted(errors, key=errors.get)
    assert errors[best] < errors[other] and taken(report)["allocation"] == best
    assert report.choices[1].reason == (
        f"since its outputs are nearest: error {errors[best]:.3g}, otherwise {errors[other]:.3g}"
    )
    for one, wanted_weight in zip(model.get_weights(), kept[best], strict=True):
        np.testing.assert_array_equal(one, wanted_weight)


def test_each_of_the_allocations_can_be_the_nearest():
    # Weights of very different sizes in one layer: LAMP sees them, and so do errors; which wins depends on the layers.
    found = set()
    for seed in range(8):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((8,)), L.Dense(24, "relu"), L.Dense(6, "relu"), L.Dense(4)])
        found.add(taken(pk.prune(model, 0.6, inputs()))["allocation"])
    assert found == {"layer_error", "lamp"}


def test_a_large_model_is_pruned_once(monkeypatch):
    monkeypatch.setattr(choices, "LARGEST", 100)
    told = []
    report = pk.prune(network(), 0.5, inputs(), progress=lambda *step: told.append(step))
    assert report.choices[1] == Choice("allocation", "layer_error", "since data were given")
    assert not any("trial" in text for *_, text in told)


def test_the_progress_names_the_trials_and_an_interruption_changes_nothing():
    model = network()
    before, told = model.get_weights(), []

    def progress(done, total, text):
        told.append((done, total, text))
        if text.startswith("trial 2 of 2: hidden_1"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pk.prune(model, 0.5, inputs(), progress=progress)
    assert [step for step in told if "trial" in step[2]][0] == (1, 6, "trial 1 of 2: hidden_0/kernel")
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_large_importances_are_not_held_at_once_in_a_training(monkeypatch):
    monkeypatch.setattr(choices, "_MOST_AT_ONCE", 1000)
    model = network()
    model.compile("sgd", "mse")
    callback = pk.PruningCallback(pk.schedules.OneShot(0.5))
    model.fit(inputs(), np.zeros((64, 4)), verbose=0, callbacks=[callback])
    assert taken(callback.report) == {"criterion": "magnitude", "allocation": "erk"}


def test_a_layer_that_is_too_large_is_pruned_without_repair_and_named(monkeypatch):
    # The hidden layers have 8 and 16 inputs.
    monkeypatch.setattr(layer_products, "_MOST_OF_A_LAYER", 40 * 15**2)
    model = network()
    model.layers[0].kernel.assign(np.abs(model.layers[0].kernel))
    report = pk.prune(model, 0.5, inputs())
    assert [row.name for row in report.layer_errors] == ["hidden_0/kernel"]
    assert report.target_sparsity == 0.5
    assert any(
        note.startswith("hidden_1/kernel is pruned by magnitude, without repair: a layer of 16 inputs needs")
        for note in report.notes
    )


class Doubled(L.Dense):
    """A Dense layer with a call of its own."""

    def call(self, inputs, training=None):
        return 2 * super().call(inputs)


def test_a_layer_without_a_formula_is_pruned_by_magnitude_and_the_others_are_repaired():
    def build():
        keras.utils.set_random_seed(0)
        return sequential((8,), L.Dense(16, name="first"), Doubled(16, name="own"), L.Dense(4, name="head"))

    model, dense = build(), build()
    report = pk.prune(model, 0.5, inputs(), include=["first", "own", "head"])
    assert [row.name for row in report.layer_errors] == ["first/kernel", "head/kernel"]
    assert taken(report)["allocation"] == "erk" and report.target_sparsity == pytest.approx(0.5, abs=0.01)
    (note,) = [note for note in report.notes if note.startswith("own/kernel is pruned by magnitude, without repair")]
    kernel, before = (np.array(one.get_layer("own").kernel) for one in (model, dense))
    assert (kernel[kernel != 0] == before[kernel != 0]).all() and np.abs(before[kernel == 0]).max() <= np.abs(
        before[kernel != 0]
    ).min()
    # Asked for, the method is refused with its reason.
    for options in ({"repair": "weights"}, {"criterion": "output_error"}):
        with pytest.raises(ValueError, match="own/kernel"):
            pk.prune(build(), 0.5, inputs(), include=["first", "own", "head"], **options)


def test_data_that_no_criterion_reads_are_named():
    report = pk.prune(network(), 0.5, inputs(), criterion="synflow")
    assert any(
        note.startswith("The data were not read for pruning: SynFlow(rounds=100) needs none") for note in report.notes
    )


def test_metrics_and_outputs_before_and_after_are_in_the_report():
    model = network()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    labels = np.argmax(model.predict(inputs(), verbose=0), axis=1)
    report = pk.prune(model, 0.95, (inputs(), labels))
    (accuracy,) = [one for one in report.damage.metrics if one.name == "accuracy"]
    assert accuracy.before == 1 and accuracy.after < 0.9
    assert any(note.startswith("Much was lost on 64 examples of the data: accuracy 1 -> ") for note in report.notes)
    assert report.to_dict()["damage"]["examples"] == 64
    assert pk.prune(network(), 0.5).damage is None


@pytest.mark.parametrize(
    ("options", "data", "said"),
    [
        ({"repair": "none"}, False, True),
        ({}, False, False),
        ({}, True, False),
        ({"criterion": "magnitude"}, False, False),
        ({"pattern": "channel"}, False, False),
    ],
)
def test_a_pruning_without_data_says_what_data_would_give(options, data, said):
    choices = pk.prune(network(), 0.5, inputs() if data else None, **options).choices
    assert any("output_error would lose less" in choice.reason for choice in choices) == said


def test_choices_are_no_option_of_a_call():
    with pytest.raises(TypeError, match="choices"):
        pk.prune(network(), 0.5, choices=())
    assert PruningOptions().choices == ()


@pytest.mark.parametrize("data", [None, inputs()], ids=["no data", "data"])
def test_the_names_that_are_taken_make_the_same_smaller_model(data):
    smaller, report = pk.shrink(network(), channels=0.5, data=data)
    assert taken(report).keys() == {"criterion", "allocation"} | ({"repair"} if data is None else set())
    written, _ = pk.shrink(network(), channels=0.5, data=data, **taken(report))
    for one, other in zip(smaller.get_weights(), written.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert f"criterion: {taken(report)['criterion']}" in str(report)


@pytest.mark.parametrize("allocation", ["erk", "lamp", "auto"])
def test_zeros_that_were_there_count_so_that_the_sparsity_stays_as_asked(allocation):
    model = network()
    # Three quarters of the smallest weight: more than a share by shapes or importances would take.
    pk.prune(model, 0.75, criterion="magnitude", allocation="uniform", include="head")
    report = pk.prune(model, 0.5, allocation=allocation)
    assert report.target_sparsity == 0.5
    assert next(row for row in report.weights if row.name == "head/kernel").zeros >= 48


def test_a_sparsity_that_would_empty_all_weights_keeps_one_entry_of_each():
    report = pk.prune(network(), 0.999, policy="gradual", allocation="erk")
    assert [row.size - row.zeros for row in report.weights if row.name.endswith("kernel")] == [1, 1, 1]
