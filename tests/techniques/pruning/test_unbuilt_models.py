"""Models that stay unbuilt for Keras, and layers that are built later, in reports, one-shot pruning and loops."""

import keras
import pytest
from fit_built_models import BACKEND, KINDS, TENSORFLOW, Autoencoder, Subclassed, Trainer, compiled, features, labels
from fit_built_training import fit, schedule
from keras import layers

import prunekit as pk

on_tensorflow = pytest.mark.skipif(BACKEND != TENSORFLOW, reason="elsewhere Keras builds before callbacks run")


class Calibrated(Subclassed):
    """Has a layer that only evaluation calls."""

    def __init__(self):
        super().__init__()
        self.calibration = layers.Dense(4, name="calibration")

    def call(self, inputs, training=False):
        outputs = super().call(inputs, training=training)
        return outputs if training else self.calibration(outputs)


@on_tensorflow
def test_layers_that_are_built_later_are_named_once():
    model = Calibrated()
    model.compile("adam", KINDS["subclassed"].compile()["loss"])
    pruning = pk.PruningCallback(schedule(), allocation="uniform")
    with pytest.warns(UserWarning) as caught:
        fit(model, "subclassed", pruning, validation_data=(features(3), labels()))
    late = [str(one.message) for one in caught if "after pruning had begun" in str(one.message)]
    assert len(late) == 1
    assert late[0].startswith("calibration: built after pruning had begun, so calibration/kernel, calibration/bias")
    assert late[0] in pruning.notes
    reasons = {item.name: item.reason for item in pruning.report.skipped}
    assert reasons["calibration/kernel"] == "its layer was built after pruning had begun"
    assert "calibration" not in reasons
    assert "calibration/kernel" not in pruning.report.targets


@on_tensorflow
def test_a_pruner_names_layers_that_a_loop_builds_later():
    model = compiled("trainer of a functional model")
    model.later = layers.Dense(2, name="later")
    with pytest.warns(UserWarning, match="later: built after pruning had begun, so later/kernel, later/bias is not"):
        with pk.Pruner(model, pk.schedules.OneShot(sparsity=0.5), allocation="uniform") as pruner:
            model.train_on_batch(features(), labels())
            pruner.step()
            model.later(features())
    assert {item.name for item in pruner.report.skipped} >= {"later/kernel", "later/bias"}


@pytest.mark.every_backend
@pytest.mark.skipif(BACKEND == "jax", reason="arrays of JAX are values, not variables")
def test_variables_that_keras_does_not_know_are_named_in_the_reports():
    model = compiled("raw variables")
    fit(model, "raw variables", epochs=1)
    expected = ["scale", "tables_shift", "module/gain"] if BACKEND == TENSORFLOW else ["scale"]
    for report in (pk.inspect(model), pk.prune(model, 0.5, allocation="uniform")):
        named = {item.name: item.reason for item in report.skipped if "Keras does not know" in item.reason}
        assert list(named) == expected
    assert "skipped: scale" in str(pk.inspect(model))


def test_a_model_whose_layers_have_weights_needs_not_be_built():
    model = Trainer()
    model.built = False
    assert pk.inspect(model).parameters == 8 * 16 + 16 + 16 * 4 + 4
    report = pk.prune(model, 0.5, allocation="uniform")
    assert report.targets == KINDS["trainer of a functional model"].pruned
    assert report.target_sparsity == 0.5


def test_cost_counts_a_model_that_is_not_built_on_the_inputs_given():
    model = Subclassed()
    for layer, shape in ((model.hidden, (None, 8)), (model.norm, (None, 16)), (model.logits, (None, 16))):
        layer.build(shape)
    assert not model.built
    assert pk.cost(model, inputs=features()).macs == 8 * 16 + 16 * 4


@on_tensorflow
def test_cost_of_a_model_without_call_names_its_parts():
    model = Autoencoder()
    with pytest.raises(ValueError, match=r"'autoencoder.*' has no `call`.*Count its parts.*encoder.*decoder"):
        pk.cost(model, inputs=features())
    assert any("has no `call`" in note for note in pk.inspect(model).notes)


@on_tensorflow
def test_a_pruner_in_a_loop_takes_a_model_that_keras_calls_unbuilt():
    model = compiled("trainer of a functional model")
    with pk.Pruner(model, schedule(), allocation="uniform") as pruner:
        for _ in range(10):
            model.train_on_batch(features(), labels())
            pruner.step()
    assert not model.built
    assert round(pruner.sparsity, 2) == 0.75


@on_tensorflow
def test_optimizers_in_lists_and_dictionaries_are_found():
    class Parts(Trainer):
        def compile(self, **optimizers):
            super().compile()
            self.of_parts = {"all": [optimizers["one"]]}

        def train_step(self, data):
            self.optimizer, former = self.of_parts["all"][0], self.optimizer
            try:
                return super().train_step(data)
            finally:
                self.optimizer = former

    model = Parts()
    model.compile(one=keras.optimizers.Adam(0.01))
    pruning = pk.PruningCallback(schedule(), allocation="uniform")
    fit(model, "trainer of a functional model", pruning)
    assert (pruning.pruner.step_count, round(pruning.pruner.sparsity, 2)) == (12, 0.75)
