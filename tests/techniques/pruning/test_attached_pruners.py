"""A weight is pruned by one Pruner or PruningCallback at a time: the second one is refused before a weight moves."""

import keras
import numpy as np
import pytest

from prunekit.operations.prune import prune
from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

HALF = ConstantSparsity(0.5)
LATER = PolynomialDecay(0.0, 0.5, begin_step=4, end_step=8)
REFUSED = (
    r"one Pruner or PruningCallback at a time. Received: hidden/kernel, logits/kernel, pruned by another.*finish\(\)"
)


class BuildsAPruner(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.pruner = Pruner(self.model, LATER, allocation="uniform")


SECOND = {
    "Pruner": lambda model, batches: Pruner(model, HALF, allocation="uniform"),
    "Pruner of another optimizer": lambda model, batches: Pruner(
        model, HALF, keras.optimizers.SGD(), allocation="uniform"
    ),
    "PruningCallback": lambda model, batches: model.fit(
        **batches, callbacks=[PruningCallback(HALF, allocation="uniform")]
    ),
    "prune": lambda model, batches: prune(model, 0.5, allocation="uniform"),
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
@pytest.mark.short(cases=2)
def test_weights_that_a_pruner_prunes_are_refused_by_name_before_a_weight_moves(compiled, batches, second):
    first, before = Pruner(compiled, LATER, allocation="uniform"), compiled.get_weights()
    with pytest.raises(ValueError, match=REFUSED):
        second(compiled, batches)
    for one, other in zip(before, compiled.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.sparsity == 0.0


@pytest.mark.parametrize("builder_first", [True, False])
def test_a_pruner_that_another_callback_builds_is_refused_before_a_weight_moves(compiled, batches, builder_first):
    before, builder = compiled.get_weights(), BuildsAPruner()
    both = [builder, PruningCallback(HALF, allocation="uniform")][:: 1 if builder_first else -1]
    with pytest.raises(ValueError, match=REFUSED):
        compiled.fit(**batches, callbacks=both)
    for one, other in zip(before, compiled.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_pruner_built_after_the_callback_was_made_is_refused_in_its_second_fit(compiled, batches):
    pruning = PruningCallback(HALF, allocation="uniform")
    compiled.fit(**batches, callbacks=[pruning])
    with Pruner(compiled, HALF, allocation="uniform"), pytest.raises(ValueError, match=REFUSED):
        compiled.fit(**batches, callbacks=[pruning])


@pytest.mark.filterwarnings("ignore:The schedule lands on:UserWarning")
def test_the_next_pruner_is_accepted_after_finish_an_exception_and_a_new_optimizer(compiled):
    Pruner(compiled, LATER, allocation="uniform").finish()
    with pytest.raises(ZeroDivisionError), Pruner(compiled, LATER, allocation="uniform"):
        raise ZeroDivisionError
    Pruner(compiled, LATER, allocation="uniform")
    compiled.compile("sgd", compiled.loss)
    Pruner(compiled, LATER, allocation="uniform").finish()


def test_pruners_of_different_weights_prune_one_model(compiled, samples):
    with (
        Pruner(compiled, HALF, include=["hidden"], allocation="uniform") as first,
        Pruner(compiled, HALF, include=["logits"], allocation="uniform") as second,
    ):
        compiled.train_on_batch(*samples)
        first.step(), second.step()
    assert [int((layer.kernel.numpy() == 0).sum()) for layer in compiled.layers] == [64, 32]


def test_a_pruner_out_of_reach_without_optimizer_refuses_nothing(perceptron):
    first = set(Pruner(perceptron, LATER, allocation="uniform").masks)
    assert first and set(Pruner(perceptron, LATER, allocation="uniform").masks) == first


def test_a_layer_of_two_models_is_pruned_through_one_of_them(compiled, perceptron):
    outer = keras.Sequential([keras.Input(compiled.input_shape[1:]), compiled.layers[0], keras.layers.Dense(2)])
    with (
        Pruner(compiled, HALF, allocation="uniform"),
        pytest.raises(ValueError, match="Received: hidden/kernel, pruned by another Pruner"),
    ):
        Pruner(outer, HALF, allocation="uniform")
