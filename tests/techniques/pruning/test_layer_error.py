"""The allocation by layer errors: exact counts, equal errors or the least sum, and errors as plain NumPy has them."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import ops
from networks import dense_network

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.statistics.statistics import Collectors
from prunekit.sparsity.convex_shares import least_total
from prunekit.techniques.pruning.policies import layer_error
from prunekit.techniques.pruning.policies.layer_error import GRID, LayerErrorAllocation, error_curve


@pytest.fixture(scope="module")
def network():
    model = dense_network(12, seed=0, wide=30, middle=20, head=4)
    x = np.random.default_rng(0).normal(size=(300, 12)) @ np.random.default_rng(1).normal(size=(12, 12))
    x = x.astype("float32")
    targets, _ = find_targets(model)
    statistics = Collectors(["hessian"], model, targets, x).values()
    scores = [np.abs(ops.convert_to_numpy(target.variable)) for target in targets]
    return model, x, targets, scores, statistics


@pytest.fixture(scope="module")
def curves(network):
    return [error_curve(*row) for row in zip(*network[2:], strict=True)]


def shares(network, sparsity, objective):
    return LayerErrorAllocation(objective).sparsities(sparsity, *network[2:])


@pytest.mark.parametrize("objective", ["equal", "product"])
@pytest.mark.parametrize("sparsity", [0.0, 0.001, 0.5, 0.9, 0.99])
def test_counts_are_exact_and_every_weight_keeps_an_entry(network, objective, sparsity):
    sizes = np.array([target.size for target in network[2]])
    counts = np.array(shares(network, sparsity, objective)) * sizes
    np.testing.assert_allclose(counts, counts.round(), atol=1e-9)
    assert counts.sum().round() == round(sparsity * sizes.sum())
    assert (counts < sizes).all()


@pytest.mark.parametrize("objective", ["equal", "product"])
def test_no_layer_gets_denser_when_the_sparsity_rises(network, objective):
    each = np.array([shares(network, sparsity, objective) for sparsity in np.linspace(0.05, 0.95, 10)])
    assert (np.diff(each, axis=0) >= -1e-12).all()


def test_equal_errors_are_equal_and_the_greatest_product_keeps_more(network, curves):
    errors = {
        objective: [np.interp(share, GRID, curve) for share, curve in zip(each, curves, strict=True)]
        for objective, each in ((name, shares(network, 0.7, name)) for name in ("equal", "product"))
    }
    assert np.ptp(errors["equal"]) < 0.02 < np.ptp(errors["product"])
    kept = {objective: np.prod(1 - np.array(each)) for objective, each in errors.items()}
    assert kept["product"] > kept["equal"]


def test_no_layer_is_given_up_where_the_sum_of_the_errors_would_be_least(monkeypatch):
    # The error of the first weight rises at once; beyond 75 %, that of the second rises faster.
    curves = {5000: np.array(GRID) ** 0.25, 5001: np.array(GRID) ** 8}
    monkeypatch.setattr(layer_error, "error_curve", lambda target, *_: curves[target.size])
    targets = [SimpleNamespace(shape=(size,), size=size, variable=np.ones(size)) for size in curves]
    assert least_total(4500, [*curves], [(GRID, curve) for curve in curves.values()]) == [749, 3751]
    found = LayerErrorAllocation().sparsities(4500 / 10001, targets, [None, None], [None, None])
    assert [round(share * size) for share, size in zip(found, curves, strict=True)] == [249, 4251]


def test_the_error_is_that_of_the_removed_weights_after_compensation(network, curves):
    """Removing by magnitude and fitting the rest by least squares has at most this error, and no fit at least this."""
    model, x, targets, scores, _ = network
    kernel, hidden = ops.convert_to_numpy(targets[0].variable), x.astype("float64")
    at = GRID.index(0.5)
    kept = scores[0] > np.sort(scores[0], axis=None)[round(0.5 * kernel.size) - 1]
    outputs = hidden @ kernel
    unfitted = np.square(hidden @ np.where(kept, kernel, 0) - outputs).sum()
    fitted = 0.0
    for output in range(kernel.shape[1]):
        columns = hidden[:, kept[:, output]]
        best = np.linalg.lstsq(columns, outputs[:, output], rcond=None)[0]
        fitted += np.square(columns @ best - outputs[:, output]).sum()
    energy = np.square(outputs).sum()
    assert fitted / energy <= curves[0][at] < unfitted / energy
    assert curves[0][0] == 0 and curves[0][-1] == pytest.approx(1, abs=1e-6)


def test_one_name_does_for_prune_and_for_overrides(network):
    model, x, *_ = network
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    report = pk.prune(copy, 0.8, x, criterion="sparsegpt", allocation="layer_error", overrides={"head": 0.25})
    sparsity = {row.name: row.sparsity for row in report.weights}
    assert report.target_sparsity == pytest.approx(0.8, abs=1e-3) and sparsity["head/kernel"] == 0.25
    with pytest.raises(ValueError, match="collected from data. Received: no data"):
        pk.prune(copy, 0.9, allocation="layer_error", repair="none")


def test_an_unknown_objective_is_refused():
    with pytest.raises(ValueError, match="`objective` is product or equal. Received: 'least'"):
        LayerErrorAllocation("least")


def test_in_a_gradual_schedule_the_sparsity_is_exact_at_each_update(network):
    model, x, *_ = network
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    copy.compile("sgd", "mse")
    callback = pk.PruningCallback(
        pk.schedules.PolynomialDecay(0.2, 0.9, 0, 20, frequency=5),
        data=x,
        criterion="sparsegpt",
        allocation="layer_error",
    )
    copy.fit(x, np.zeros((len(x), 4)), batch_size=15, epochs=2, verbose=0, callbacks=[callback])
    size = sum(target.size for target in network[2])
    for event in callback.report.events:
        assert round(event.reached * size) == round(event.asked * size)


def test_weights_of_inputs_that_are_always_zero_do_not_count_as_pruned(network):
    model, x, *_ = network
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    halved = x.copy()
    halved[:, ::2] = 0
    assert pk.prune(copy, 0.1, halved, criterion="sparsegpt", allocation="layer_error").target_sparsity == 0.1
    assert pk.prune(copy, 0.5, halved, criterion="sparsegpt", allocation="layer_error").target_sparsity == 0.5
