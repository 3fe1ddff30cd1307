"""policy="tfmot": what it refuses, and how it is told apart; tests/parity compares what it does with the original."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.interop.tfmot.policy import TfmotPolicy, ThresholdCalculator
from prunekit.techniques.pruning.masks.mask_calculator import MaskCalculator
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.policies.gradual import Gradual
from prunekit.techniques.pruning.training.pruner_run import PrunerRun


@pytest.mark.every_backend
@pytest.mark.parametrize(
    "schedule, options, message",
    [
        (pk.schedules.LinearDecay(), {}, r"has two schedules.*Received: LinearDecay"),
        (pk.schedules.PolynomialDecay(0.0, 0.5, 3, 3), {}, r"length of a PolynomialDecay.*begin_step=end_step=3"),
        (
            pk.schedules.ConstantSparsity(0.5),
            {"criterion": "l2"},
            r"supports only the criterion Magnitude\(\)\. Received: criterion=L2",
        ),
        (
            pk.schedules.ConstantSparsity(0.5),
            {"criterion": "movement"},
            r"Received: criterion=Movement\(\) with policy",
        ),
        (pk.schedules.ConstantSparsity(0.5), {"criterion": abs}, "Received: criterion=Custom"),
        (
            pk.schedules.ConstantSparsity(0.5),
            {"allocation": "global"},
            r"supports only the allocation Uniform\(\)\. Received: allocation=Global",
        ),
        (
            pk.schedules.ConstantSparsity(0.5),
            {"pattern": "channel"},
            "supports the patterns unstructured, blocks and m by n. Received: pattern=channel",
        ),
        (
            pk.schedules.ConstantSparsity(0.5),
            {"keep_zeros": True},
            "lets existing zeros grow back. Received: keep_zeros=True",
        ),
    ],
    ids=str,
)
def test_what_it_never_had_is_refused_in_one_line_everywhere(schedule, options, message, perceptron):
    before = perceptron.get_weights()
    options = {"policy": "tfmot", **options}
    for refused in (
        lambda: pk.PruningCallback(schedule, **options),
        lambda: pk.Pruner(perceptron, schedule, **options),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            refused()
        assert "\n" not in str(caught.value)
    if isinstance(schedule, pk.schedules.ConstantSparsity) and options.get("criterion") != "movement":
        with pytest.raises(ValueError, match=message):
            pk.prune(perceptron, 0.5, **options)
    for one, other in zip(before, perceptron.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_zeros_compete_with_tfmot_and_stay_without():
    assert PruningOptions().keep_zeros is True
    assert PruningOptions(policy="tfmot").keep_zeros is False
    assert PruningOptions(policy="tfmot", keep_zeros=False).keep_zeros is False
    assert PruningOptions(keep_zeros=False).keep_zeros is False


def test_the_rules_that_the_name_stands_for():
    assert PruningOptions().policy == Gradual()
    assert PruningOptions(policy="tfmot").policy == TfmotPolicy()
    targets, _ = find_targets(keras.Sequential([keras.Input((7,)), keras.layers.Dense(1)]))
    kinds = (MaskCalculator, ThresholdCalculator)
    assert [kind(targets, PruningOptions(allocation="uniform"), 0.5).units_pruned(0.5) for kind in kinds] == [[4], [3]]


def test_the_earlier_option_is_answered_with_the_present_one(perceptron):
    with pytest.raises(TypeError, match="Received: 'compat'.*It is now 'policy=\"tfmot\"'"):
        pk.prune(perceptron, 0.5, compat="tfmot")


@pytest.mark.every_backend
def test_prune_applies_the_rule_once_and_to_the_weights(perceptron):
    kernel = perceptron.layers[0].kernel
    kernel.assign(np.repeat([[1.0, 2.0]], [100, 28]).reshape(8, 16))
    pk.prune(perceptron, 0.5, include="hidden", policy="tfmot")
    assert (kernel.numpy() == 0).sum() == 0  # all are tied with the threshold
    report = pk.prune(perceptron, 0.5, include="hidden", allocation="uniform")
    assert (kernel.numpy() == 0).sum() == 64
    assert report.targets == ("hidden/kernel",)
    kernel.assign(np.arange(-64.0, 64.0).reshape(8, 16))
    report = pk.prune(perceptron, 0.9, include="hidden", policy="tfmot")
    assert (kernel.numpy() == 0).sum() == 128 - 13
    assert report.events[0].reached == pytest.approx(115 / 128)


def test_a_bad_layer_of_a_model_is_named():
    model = keras.Sequential([keras.Input((6, 4)), keras.layers.Bidirectional(keras.layers.GRU(2), name="both")])
    with pytest.raises(
        ValueError, match=r"Received: both/forward_gru\w*/kernel \(GRUCell\), .*does not prune\. Leave them out with"
    ):
        pk.prune(model, 0.5, policy="tfmot")


@tensorflow_only
def test_prunekits_loops_refuse_a_pruner_that_goes_before_each_batch(perceptron):
    optimizer = keras.optimizers.SGD(0.1)
    pruner = pk.Pruner(perceptron, pk.schedules.ConstantSparsity(0.5, 1), optimizer, policy="tfmot")
    with pytest.raises(
        ValueError, match=r"TapeLoop steps its pruner after each update.*Received: a pruner with policy=Tfmot"
    ):
        pk.loops.TapeLoop(perceptron, optimizer, "mse", pruner=pruner)
    with pytest.raises(ValueError, match="LevenbergMarquardt steps its pruner after each update"):
        pk.loops.LevenbergMarquardt(perceptron, pruner=pruner)


def test_an_interrupted_fit_leaves_the_weights_as_the_update_made_them(perceptron, samples):
    perceptron.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyError("stop")

    pruning = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, 1, frequency=1), policy="tfmot")
    with pytest.raises(KeyError):
        perceptron.fit(*samples, batch_size=16, verbose=0, callbacks=[pruning, Breaks()])
    assert (perceptron.layers[0].kernel.numpy() == 0).sum() < 64
    assert pruning.pruner.step_count == 2


def test_a_second_fit_counts_on(perceptron, samples):
    perceptron.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pruning = pk.PruningCallback(pk.schedules.PolynomialDecay(0.0, 0.5, 0, 7, frequency=3), policy="tfmot")
    with pytest.warns(UserWarning, match="lands on sparsity 0.4985.* at step 6, but training") as caught:
        perceptron.fit(*samples, batch_size=16, verbose=0, callbacks=[pruning])
    assert "at 0.4067" in str(caught[0].message)
    perceptron.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    perceptron.fit(*samples, batch_size=16, verbose=0, callbacks=[pruning])
    assert [event.step for event in pruning.report.events] == [3, 6]
    assert pruning.pruner.step_count == 10


@pytest.mark.every_backend
def test_a_training_in_another_process_continues_with_its_steps_and_masks(perceptron, samples):
    perceptron.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # After 5 steps the next update comes at 9: the forward passes until then need the masks of the last one.
    schedule = pk.schedules.ConstantSparsity(0.3, 3, frequency=6)
    whole, rest = (pk.PruningCallback(schedule, policy="tfmot", origin=origin) for origin in (None, -5))
    fit = {"batch_size": 16, "shuffle": False, "verbose": 0}
    perceptron.fit(*samples, **fit, callbacks=[whole])
    halfway = perceptron.get_weights()
    perceptron.fit(*samples, **fit, callbacks=[whole])
    ended = perceptron.get_weights()
    perceptron.set_weights(halfway)
    perceptron.fit(*samples, **fit, callbacks=[rest])
    for name, mask in whole.pruner.masks.items():
        np.testing.assert_array_equal(rest.pruner.masks[name], mask)
    for one, other in zip(ended, perceptron.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [(event.step, event.asked) for event in rest.report.events] == [
        (event.step, event.asked) for event in whole.report.events if event.step > 5
    ]
    assert [event.step for event in whole.report.events] == [3, 9]
    assert rest.pruner.sparsity == pytest.approx(whole.pruner.sparsity)


@pytest.mark.every_backend
def test_zeros_compete_where_a_training_continues_before_the_first_update(perceptron, samples):
    perceptron.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    kernel = np.array(perceptron.layers[0].kernel)
    kernel[:4] = 0
    perceptron.layers[0].kernel.assign(kernel)
    schedule = pk.schedules.ConstantSparsity(0.5, 90, frequency=10)
    for origin, expected in ((-5, 0), (-90, 64)):
        pruner = PrunerRun(perceptron, schedule, PruningOptions(policy="tfmot", origin=origin))
        pruner.begin()
        assert (~pruner.masks["hidden/kernel"]).sum() == expected
