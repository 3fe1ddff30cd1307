"""Quantization in loops of one's own: what a loop trains, and what is given back at its end."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only, training_step
from keras import ops
from quantized_training import LOSS, data, network
from two_replicas import on_one_and_on_two

import prunekit as pk
from prunekit.techniques.quantize.quantization_state import unique_weights

pytestmark = pytest.mark.every_backend
X, Y = data()


def numbers(variables):
    return [np.array(ops.convert_to_numpy(ops.stop_gradient(one.value))) for one in variables]


def run(model, optimizer, steps=6, step=None):
    """Trains in the backend's own loop; returns the losses."""
    step = step or training_step(model, optimizer, LOSS)
    batches = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, 32 * steps, 32)]
    return [float(ops.convert_to_numpy(step(ops.convert_to_tensor(x), ops.convert_to_tensor(y)))) for x, y in batches]


def on_their_grids(quantized):
    found = quantized.state
    return all(
        found.weights[id(one.variable)].holds(numbers([one.variable])[0]) for one in unique_weights(found.placement)
    )


def test_a_loop_trains_weights_and_ranges_and_ends_on_integers():
    model = network(compiled=False)
    optimizer = keras.optimizers.Adam(0.01)
    before = numbers(model.trainable_variables)
    with pk.Quantizer(model, X[:64], optimizer, bits=4) as quantizer:
        scales = model.trainable_variables[: -len(before)]
        losses = run(model, optimizer, 8)
        moved = numbers(scales)
    assert losses[-1] < losses[0] and len(model.trainable_variables) == len(before)
    # Four tensors, and a scale for each of the 6 + 6 + 4 output channels of three weights.
    assert [one.shape for one in moved] == [(20,)] and (moved[0] != 0).all()
    quantized = quantizer.finish()
    assert on_their_grids(quantized) and quantizer.finish() is quantized
    assert quantized.method == "training" and {one.bits for one in quantized.weights} == {4}
    assert any((one != two).any() for one, two in zip(before, numbers(model.trainable_variables), strict=True))


def test_inside_the_model_computes_on_integers_and_outside_it_is_its_own():
    model = network()
    expected = model.predict(X[:8], verbose=0)
    quantizer = pk.Quantizer(model, X[:64], bits=2)
    inside = model.predict(X[:8], verbose=0)
    assert np.abs(inside - expected).max() > 1e-3
    quantized = quantizer.finish()
    with quantized.simulating():
        np.testing.assert_allclose(model.predict(X[:8], verbose=0), inside, rtol=1e-5, atol=1e-6)
    assert "call" not in vars(model) and "apply" not in vars(model.optimizer)


def test_a_step_is_that_of_fit():
    model = network()
    callback = pk.QuantizationCallback(X[:64], bits=4, freeze_step=-1)
    model.get_layer("dropout").rate = 0.0
    model.fit(X[:32], Y[:32], batch_size=32, epochs=1, shuffle=False, verbose=0, callbacks=[callback])
    other = network()
    other.get_layer("dropout").rate = 0.0
    with pk.Quantizer(other, X[:64], bits=4) as quantizer:
        other.train_on_batch(X[:32], Y[:32])
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    of_fit = {one.name: one.scale for one in callback.report.ranges}
    for one in quantizer.finish().ranges:
        np.testing.assert_allclose(one.scale, of_fit[one.name], rtol=1e-5)


def test_frozen_normalizations_keep_their_statistics_and_train_their_factors():
    model = network()
    with pk.Quantizer(model, X[:64], bits=4) as quantizer:
        run(model, model.optimizer, 2)
        quantizer.freeze_normalizations()
        norm = model.get_layer("norm")
        before, gamma = numbers([norm.moving_mean, norm.moving_variance]), numbers([norm.gamma])
        run(model, model.optimizer, 2)
        for one, two in zip(before, numbers([norm.moving_mean, norm.moving_variance]), strict=True):
            np.testing.assert_array_equal(one, two)
        assert (numbers([norm.gamma])[0] != gamma[0]).any()


@pytest.mark.parametrize("frozen", [False, True], ids=["moving", "frozen"])
def test_a_loop_that_is_resumed_ends_as_one_that_was_not_interrupted(frozen, tmp_path):
    def started(values=()):
        model = network(compiled=False)
        # On PyTorch, Keras draws dropout without a seed from the global generator.
        model.get_layer("dropout").rate = 0.0
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        variables = [*model.variables, *optimizer.variables]
        for variable, value in zip(variables, values, strict=bool(values)):
            variable.assign(value)
        quantizer = pk.Quantizer(model, X[:64], optimizer, bits=4, range_learning_rate=0.01)
        return model, optimizer, variables, quantizer

    model, optimizer, variables, whole = started()
    run(model, optimizer, 3)
    if frozen:
        whole.freeze_normalizations()
        run(model, optimizer, 1)
    np.savez(tmp_path / "scales.npz", **whole.state())
    saved = numbers(variables)
    run(model, optimizer, 4)

    other, its_optimizer, its_variables, resumed = started(saved)
    # Files of other kinds give their arrays in another order.
    resumed.restore(dict(reversed(dict(np.load(tmp_path / "scales.npz")).items())))
    run(other, its_optimizer, 4)
    assert resumed.finish().ranges == whole.finish().ranges
    for one, two in zip(numbers(its_variables), numbers(variables), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_state_of_another_quantization_is_refused_and_the_loop_goes_on():
    model = network()
    quantizer = pk.Quantizer(model, X[:64], bits=4)
    state = quantizer.state()
    with pytest.raises(ValueError, match="Received: arrays without 'frozen'"):
        quantizer.restore({})
    others = pk.Quantizer(network(), X[:64], bits=4, exclude="logits")
    with pytest.raises(ValueError, match="must quantize the same tensors and weights as before"):
        others.restore(state)
    run(others.model, others.model.optimizer, 1)
    others.finish()
    quantizer.finish()
    for options in (dict(bits=8), dict(bits=4, activation_bits=16)):
        wider = pk.Quantizer(network(), X[:64], **options)
        with pytest.raises(ValueError, match="must quantize the same tensors and weights as before"):
            wider.restore(state)
        wider.finish()
    short = {name: one for name, one in state.items() if name != "zero_point/0"}
    again = pk.Quantizer(network(), X[:64], bits=4)
    with pytest.raises(ValueError, match="lacks 'zero_point/0', or another version"):
        again.restore(short)
    again.finish()
    for call in (quantizer.state, lambda: quantizer.restore(state)):
        with pytest.raises(RuntimeError, match="was called after finish"):
            call()


def test_pruned_weights_stay_zero_in_every_step():
    model = network()
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, begin_step=0, end_step=4, frequency=1)
    with (
        pk.Pruner(model, schedule, allocation="uniform") as pruner,
        pk.Quantizer(model, X[:64], bits=4) as quantizer,
    ):
        step = training_step(model, model.optimizer, LOSS)
        for start in range(0, 192, 32):
            run(model, model.optimizer, 1, step)
            pruner.step()
            assert not any(pruner.audit().values()), start
    quantized = quantizer.finish()
    for name, mask in pruner.masks.items():
        (variable,) = (one for one in model.weights if one.path == name)
        assert (numbers([variable])[0][~mask] == 0).all()
    assert on_their_grids(quantized)


def test_an_error_in_the_loop_gives_the_model_back_with_its_weights():
    model = network()
    with pytest.raises(KeyError), pk.Quantizer(model, X[:64]):
        run(model, model.optimizer, 1)
        before = model.get_weights()
        raise KeyError("stop")
    assert "call" not in vars(model) and "apply" not in vars(model.optimizer)
    assert len(model.trainable_variables) == 9
    # The scales stood among the weights.
    for one, two in zip(before[-len(model.weights) :], model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_ranges_move_with_the_weights_where_the_loops_optimizer_accumulates_gradients():
    model = network(compiled=False)
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
    with pk.Quantizer(model, X[:64], optimizer, bits=4):
        scales = model.trainable_variables[:1]
        run(model, optimizer, 1)
        assert not any(np.any(one != 0) for one in numbers(scales))
        run(model, optimizer, 1)
        assert any(np.any(one != 0) for one in numbers(scales))


def test_without_an_optimizer_it_is_refused():
    with pytest.raises(ValueError, match="Compile the model, or pass the Keras optimizer of your loop"):
        pk.Quantizer(network(compiled=False), X[:64])


def test_an_optimizer_that_is_none_of_keras_is_refused():
    with pytest.raises(TypeError, match="must be a Keras optimizer"):
        pk.Quantizer(network(), X[:64], "adam")


def test_a_model_that_is_not_built_is_refused():
    model = keras.Sequential([keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="built"):
        pk.Quantizer(model, X[:64], keras.optimizers.SGD())


def test_freezing_after_the_end_is_refused():
    quantizer = pk.Quantizer(network(), X[:64])
    quantizer.finish()
    with pytest.raises(RuntimeError, match=r"after finish\(\)"):
        quantizer.freeze_normalizations()


def test_beginning_again_after_the_end_is_refused():
    quantizer = pk.Quantizer(network(), X[:64])
    quantizer.finish()
    with pytest.raises(RuntimeError, match="has finished: the model computes in floating point"), quantizer:
        pass


SECOND = {
    "a quantization": lambda model: pk.quantize(model, X[:64]),
    "a quantizer": lambda model: pk.Quantizer(model, X[:64]),
    "a choice": lambda model: pk.choose_bits(model, X[:64], budget=10_000),
    "a callback": lambda model: model.fit(X[:64], Y[:64], verbose=0, callbacks=[pk.QuantizationCallback(X[:64])]),
}


@pytest.mark.parametrize("name", SECOND)
def test_a_second_quantization_inside_the_first_is_refused_and_the_first_goes_on(name):
    model = network()
    weights, before = model.weights, numbers(model.weights)
    with pk.Quantizer(model, X[:64]) as quantizer:
        with pytest.raises(
            RuntimeError, match="begins with a model that computes in floating point. Received: 'functional"
        ):
            SECOND[name](model)
        assert all(np.array_equal(*pair) for pair in zip(numbers(weights), before, strict=True))
        run(model, model.optimizer, 1)
    assert on_their_grids(quantizer.finish()) and "call" not in vars(model)


def test_a_quantization_inside_a_simulation_is_refused():
    model = network()
    first = pk.quantize(model, X[:64])
    with first.simulating(), pytest.raises(RuntimeError, match=r"inside `simulating\(\)`.* End that first"):
        pk.quantize(model, X[:64], bits=4)


def test_weights_that_are_not_finite_at_the_end_are_refused_by_name():
    model = network()
    weights, kernel = model.weights, model.get_layer("conv").kernel
    quantizer = pk.Quantizer(model, X[:64])
    kernel.assign(ops.full_like(kernel.value, np.nan))
    before = numbers(weights)
    with pytest.raises(ValueError, match="must be finite. Received: NaN or infinite values in conv/kernel. Lower the"):
        quantizer.finish()
    assert all(np.array_equal(*pair, equal_nan=True) for pair in zip(numbers(weights), before, strict=True))
    assert "call" not in vars(model)


def test_files_that_are_saved_inside_load_without_prunekit(tmp_path):
    model = network()
    with pk.Quantizer(model, X[:64]):
        run(model, model.optimizer, 1)
        model.save(tmp_path / "model.keras")
        count = len(model.weights)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(loaded.weights) == len(model.weights) == count - 1


@tensorflow_only
@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_tape_loop_of_prunekit_trains_in_it(jit_compile):
    model = network(compiled=False)
    optimizer = keras.optimizers.Adam(0.01)
    with pk.Quantizer(model, X[:64], optimizer, bits=4) as quantizer:
        loop = pk.loops.TapeLoop(model, optimizer, LOSS, jit_compile=jit_compile)
        history = loop.fit(X, Y, epochs=2, batch_size=32, shuffle=False).history
    assert history["loss"][-1] < history["loss"][0] and on_their_grids(quantizer.finish())


REPLICAS = """
import keras, numpy as np, prunekit as pk
from quantized_training import LOSS, data, network
x, y = data()
def trained(strategy):
    with strategy.scope():
        model = network(compiled=False)
        model.get_layer("dropout").rate = 0.0
        model.compile(keras.optimizers.SGD(0.05), LOSS)
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=10, frequency=2)
    # Statistics of a batch are those of a replica.
    callback = pk.QuantizationCallback(x[:64], bits=4, freeze_step=0)
    callbacks = [pk.PruningCallback(schedule), CLUSTERS callback]
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0, callbacks=callbacks, validation_data=(x, y))
    return [*model.get_weights(), *callback._work.values()]
"""


@tensorflow_only
@pytest.mark.thorough
@pytest.mark.parametrize(
    "clusters", ["", "pk.ClusterCallback(8, begin_step=4),"], ids=["ranges", "clusters and ranges"]
)
def test_two_replicas_train_the_weights_and_ranges_of_one(clusters, tmp_path):
    one, two = on_one_and_on_two(REPLICAS.replace("CLUSTERS", clusters), tmp_path)
    assert max(np.abs(first - second).max() for first, second in zip(one, two, strict=True)) < 1e-5
    assert max(np.abs(values).max() for values in one[-7:]) > 1e-3
