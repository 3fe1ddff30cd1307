"""Data that end early, break, or do not fit: a sparse model is left, or one clear line."""

import warnings

import numpy as np
import pytest

import prunekit as pk
from prunekit.recipe.datasets.npy import read_npz
from prunekit.recipe.text.loader import RecipeError


def batches(count, failing=None):
    for _ in range(count):
        yield np.ones((4, 8), "float32"), np.zeros((4, 4), "float32")
    if failing is not None:
        raise failing


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.parametrize("count", [1, 7])
def test_data_that_end_early_leave_a_sparse_model(perceptron, count):
    perceptron.compile("sgd", "mse")
    callback = pk.PruningCallback(
        pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=10, frequency=2), allocation="uniform"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        perceptron.fit(batches(count), steps_per_epoch=5, epochs=2, verbose=0, callbacks=[callback])
    pruner = callback.pruner
    assert not any(pruner.audit().values())
    # Keras takes one batch more than it trains on, to look at its shapes, and gives it back.
    assert pruner.step_count <= 10 and pruner.sparsity == pytest.approx(callback.report.target_sparsity)
    assert any("lands on sparsity 0.5 at step 10" in str(one.message) for one in caught) == (pruner.step_count < 9)


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
def test_data_that_break_leave_a_sparse_model_that_can_continue(perceptron, samples):
    perceptron.compile("sgd", "sparse_categorical_crossentropy")
    callback = pk.PruningCallback(
        pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=8, frequency=1), allocation="uniform"
    )

    def breaking():
        for i in range(3):
            yield samples[0][i : i + 4], samples[1][i : i + 4]
        raise OSError(5, "the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):
        perceptron.fit(breaking(), steps_per_epoch=5, epochs=2, verbose=0, callbacks=[callback])
    reached = callback.pruner.sparsity
    assert 0.0 < reached < 0.5 and not any(callback.pruner.audit().values())
    perceptron.fit(*samples, batch_size=10, epochs=2, verbose=0, callbacks=[callback])
    assert callback.pruner.sparsity == 0.5 and not any(callback.pruner.audit().values())


def test_data_with_nan_are_named(perceptron, samples):
    inputs, labels = samples
    inputs[33] = np.nan
    perceptron.compile("sgd", "sparse_categorical_crossentropy")
    callback = pk.PruningCallback(
        pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=20, frequency=2), allocation="uniform"
    )
    with pytest.raises(ValueError, match="look for a loss that became NaN"):
        perceptron.fit(inputs, labels, batch_size=4, epochs=2, verbose=0, callbacks=[callback])


@pytest.mark.parametrize("cut", [0.05, 0.5, 0.95])
def test_data_files_that_end_early_are_refused(tmp_path, cut):
    np.savez(tmp_path / "whole.npz", x=np.arange(1000.0))
    content = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: int(cut * len(content))])
    with pytest.raises(RecipeError, match="cut.npz is not a whole npz file"):
        read_npz(tmp_path / "cut.npz", {"inputs": "x"})


def test_fewer_labels_than_inputs_are_refused(perceptron, samples):
    inputs, labels = samples
    recipe = {
        "version": 1,
        "compile": {},
        "steps": [{"prune": {"epochs": 1, "schedule": {"type": "one_shot", "sparsity": 0.5}, "allocation": "uniform"}}],
    }
    for data in (((inputs, labels[:-1]), samples), (samples, (inputs[:3], labels))):
        with pytest.raises(RecipeError, match="have the same number of examples"):
            pk.compress(recipe, model=perceptron, data=data)
