"""The operation `reinitialize`: which weights are drawn again, from which seed, and what is refused."""

import json

import keras
import numpy as np
import pytest
from keras import layers
from reinitialized_models import built, kernels, wide

import prunekit as pk
from prunekit.initialization import initializers


def test_other_initializers_of_keras_draw_as_they_are():
    model = wide(units=(20, 10))
    report = initializers.reinitialize(model, "random_uniform", seed=1)
    assert report.initializer == "RandomUniform" and 0.02 < report.weights[0].std_after < 0.05
    assert not np.isclose(model.layers[0].kernel.numpy()[:20, :10], model.layers[1].kernel.numpy()).any()
    initializers.reinitialize(model, keras.initializers.Constant(2.0), include=["*/bias"])
    assert (model.layers[0].bias.numpy() == 2).all()


def test_keras_initializers_of_the_same_family_get_the_tables_axes_too():
    ours, theirs = built(layers.Conv2DTranspose(5, 3), (8, 8, 4)), built(layers.Conv2DTranspose(5, 3), (8, 8, 4))
    initializers.reinitialize(ours, initializers.HeNormal(), seed=1)
    initializers.reinitialize(theirs, keras.initializers.HeNormal(), seed=1)
    assert np.array_equal(ours.layers[0].kernel, theirs.layers[0].kernel)


def test_the_report_names_what_was_left_alone_and_why(perceptron):
    report = initializers.reinitialize(perceptron, initializers.HeNormal(), exclude=["logits"], seed=1)
    assert [row.name for row in report.weights] == ["hidden/kernel"]
    assert {item.name: item.reason for item in report.skipped} == {
        "hidden/bias": "a bias: out unless include names it",
        "logits/kernel": "excluded by 'logits'",
        "logits/bias": "excluded by 'logits'",
    }
    assert "hidden/kernel" in str(report) and "excluded by 'logits': logits/kernel, logits/bias" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["weights"][0]["fan_in"] == 8


def test_the_same_architecture_gets_the_same_weights_whatever_keras_names_its_layers():
    models = [keras.Sequential([keras.Input((9,)), layers.Dense(9)]) for _ in range(2)]
    assert models[0].layers[0].name != models[1].layers[0].name
    for model in models:
        initializers.reinitialize(model, initializers.HeNormal(), seed=1)
    assert np.array_equal(models[0].layers[0].kernel, models[1].layers[0].kernel)


def test_without_a_seed_the_initializers_own_is_used_and_reported(perceptron):
    report = initializers.reinitialize(perceptron, initializers.HeNormal(seed=9))
    kernel = perceptron.layers[0].kernel.numpy()
    assert report.seed == 9
    again = initializers.reinitialize(
        perceptron, initializers.HeNormal(seed=keras.random.SeedGenerator(1)), include="logits"
    )
    assert initializers.reinitialize(perceptron, initializers.HeNormal(), seed=again.seed).seed == again.seed
    initializers.reinitialize(perceptron, initializers.HeNormal(), seed=9)
    assert np.array_equal(perceptron.layers[0].kernel, kernel)


def test_the_zeros_of_an_attached_pruner_hold(perceptron, samples):
    perceptron.compile("adam", "sparse_categorical_crossentropy")
    with pk.Pruner(perceptron, pk.schedules.OneShot(sparsity=0.7), allocation="uniform") as pruner:
        initializers.reinitialize(perceptron, initializers.HeNormal(), masks=pruner.masks, seed=1)
        assert set(pruner.audit().values()) == {0}
        assert all((value[pruner.masks[name]] != 0).all() for name, value in kernels(perceptron).items())
        for _ in range(3):
            perceptron.train_on_batch(*samples)
            pruner.step()
        assert set(pruner.audit().values()) == {0}


def test_reinitialize_leaves_no_trace_in_a_saved_model(perceptron, tmp_path):
    initializers.reinitialize(perceptron, initializers.HeNormal(), seed=1)
    assert "prunekit" not in perceptron.to_json()


@pytest.mark.parametrize(
    ("masks", "error", "match"),
    [
        (
            {"hiden/kernel": np.ones((8, 16), bool)},
            ValueError,
            "belongs to no weight of the model.*mean 'hidden/kernel'",
        ),
        ({"hidden/kernel": np.ones((16, 8), bool)}, ValueError, r"\(16, 8\) for 'hidden/kernel' of shape \(8, 16\)"),
        ({"hidden/kernel": np.ones((8, 16))}, TypeError, "boolean, True = kept. Received: float64"),
        ([np.ones((8, 16), bool)], TypeError, "maps weight names to boolean arrays"),
    ],
    ids=["name", "shape", "type", "list"],
)
def test_wrong_masks_are_refused_before_a_weight_moves(perceptron, masks, error, match):
    before = perceptron.get_weights()
    with pytest.raises(error, match=match):
        initializers.reinitialize(perceptron, initializers.HeNormal(), masks=masks)
    assert all(map(np.array_equal, before, perceptron.get_weights()))


def test_what_is_no_initializer_no_model_or_no_weight_is_refused(perceptron):
    with pytest.raises(TypeError, match="Received: 'he_norml'"):
        initializers.reinitialize(perceptron, "he_norml")
    with pytest.raises(TypeError, match="Received: 3"):
        initializers.reinitialize(perceptron, 3)
    with pytest.raises(TypeError, match="works on Keras 3 models"):
        initializers.reinitialize(None, initializers.HeNormal())
    with pytest.raises(ValueError, match="mean 'hidden'"):
        initializers.reinitialize(perceptron, initializers.HeNormal(), include=["hiden"])
    with pytest.raises(ValueError, match="takes the axes of each weight from its layer"):
        initializers.reinitialize(perceptron, initializers.HeNormal(input_axes=[0], output_axes=[1]))


def test_a_seed_is_an_integer_of_any_kind(perceptron):
    report = initializers.reinitialize(perceptron, initializers.HeNormal(), seed=np.int64(4))
    assert json.loads(json.dumps(report.to_dict()))["seed"] == 4
    with pytest.raises(TypeError, match="integer"):
        initializers.reinitialize(perceptron, initializers.HeNormal(), seed=0.5)
