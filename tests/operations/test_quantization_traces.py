"""When the steps of a training on integers are traced, and when former traces are used."""

import numpy as np
import pytest
from backends import tensorflow_only
from quantized_training import X, Y, fit, network, quantizing

import prunekit as pk
from prunekit.core.training import train_function

pytestmark = pytest.mark.every_backend


def test_the_steps_traced_before_quantization_begins_are_not_used_after():
    """The pruning callback's step was traced alone; from the begin of quantization on it is traced in both scopes."""
    model = network()
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, begin_step=1, end_step=12, frequency=2)
    built = []
    original = train_function.ScopedFunction._build

    def counted(self):
        built.append(self)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_function.ScopedFunction, "_build", counted)
        callback = quantizing(bits=3, begin_step=4, freeze_step=10)
        fit(model, pk.PruningCallback(schedule, allocation="uniform"), callback, epochs=2)
    # The pruning's at the start, at the begin and at the freeze; the quantization's at the two latter.
    assert len(built) == 5
    assert any(np.any(one != 0) for one in callback._run.work.values())


class _Traces:
    """Counts how often the step of a model is traced, which calls its `train_step` and `test_step`."""

    def __init__(self, model, patch):
        self.count = 0
        for name in ("train_step", "test_step"):
            patch.setattr(type(model), name, self._counted(getattr(type(model), name)))

    def _counted(self, step):
        def run(*args, **kwargs):
            self.count += 1
            return step(*args, **kwargs)

        return run


def trained_from(start, model, **options):
    """The callback and the history of an epoch from given weights, with an optimizer and seeds as at the start."""
    model.set_weights(start)
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables[:1] + model.optimizer.variables[2:]:
        variable.assign(np.zeros(variable.shape, "float32"))
    model.get_layer("dropout").seed_generator.state.assign(np.array([0, 0], "uint32"))
    callback = quantizing(X[64:128], range_learning_rate=0.01, **{"bits": 4} | options)
    return callback, fit(model, callback, epochs=1, validation_data=(X, Y)).history


@tensorflow_only
def test_a_new_callback_on_the_same_model_needs_no_trace_and_trains_as_one_on_a_new_model(monkeypatch):
    first, second = network(), network()
    start = first.get_weights()
    former = quantizing(bits=4)
    fit(first, former, epochs=1, validation_data=(X, Y))
    values = former._run.work.values()
    traces = _Traces(first, monkeypatch)
    found, history = trained_from(start, first)
    assert traces.count == 0
    # The former callback keeps its own ranges.
    for one, two in zip(former._run.work.values(), values, strict=True):
        np.testing.assert_array_equal(one, two)
    expected, expected_history = trained_from(start, second)
    assert traces.count > 0
    for one, two in zip(first.get_weights(), second.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    for one, two in zip(found._run.work.values(), expected._run.work.values(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
    assert history["val_loss"] == pytest.approx(expected_history["val_loss"], rel=1e-4)


@tensorflow_only
@pytest.mark.thorough
def test_the_step_with_frozen_normalizations_is_kept_too_and_other_options_need_a_trace(monkeypatch):
    model = network()
    start = model.get_weights()
    fit(model, quantizing(bits=4, freeze_step=4), epochs=1, validation_data=(X, Y))
    traces = _Traces(model, monkeypatch)
    trained_from(start, model, freeze_step=6)
    assert traces.count == 0
    trained_from(start, model, bits=3)
    assert traces.count > 0


@tensorflow_only
def test_the_former_callback_goes_on_after_another_one_took_its_trace():
    model = network()
    first = quantizing(bits=4, range_learning_rate=0.01)
    fit(model, first, epochs=1)
    ranges = {one.name: one.scale for one in first.report.ranges}
    fit(model, quantizing(bits=4, data=X[:64] * 3), epochs=1)
    fit(model, first, epochs=1)
    for one in first.report.ranges:
        assert abs(np.log(one.scale / ranges[one.name])) <= 0.2
