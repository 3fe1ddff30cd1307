"""Data that are scaled otherwise than in training, as normalizations and preprocessing layers know it."""

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import sequential

from prunekit.core.statistics.input_scale import scale_problem

pytestmark = pytest.mark.every_backend

IMAGES = np.random.default_rng(0).random(size=(32, 6, 6, 1)).astype("float32")


def convolutions(*before, trained=True):
    """Returns a network whose batch normalization has the statistics of images with values in [0, 1]."""
    keras.utils.set_random_seed(0)
    model = sequential((6, 6, 1), *before, L.Conv2D(4, 3, name="conv"), L.BatchNormalization(name="norm", momentum=0.0))
    if trained:
        model(IMAGES if not before else IMAGES * 255, training=True)
    return model


def normalized():
    layer = L.Normalization(name="standard", axis=-1)
    layer.adapt(IMAGES)
    return keras.Sequential([keras.Input((6, 6, 1)), layer, L.Conv2D(4, 3)])


@pytest.mark.parametrize("factor", [1.0, 0.5, 2.0])
def test_data_as_in_training_are_no_problem(factor):
    assert scale_problem(convolutions(), IMAGES * factor) is None
    assert scale_problem(convolutions(L.Rescaling(1 / 255, name="rescale")), IMAGES * factor * 255) is None
    assert scale_problem(normalized(), IMAGES * factor) is None


def test_pixels_where_the_model_was_trained_on_fractions_are_named_by_the_batch_normalization():
    found = scale_problem(convolutions(), IMAGES * 255)
    assert "the inputs of 'norm' vary " in found
    assert scale_problem(convolutions(), IMAGES / 255) is not None


def test_fractions_where_a_rescaling_reads_pixels_are_named_by_it():
    found = scale_problem(convolutions(L.Rescaling(1 / 255, name="rescale"), trained=False), IMAGES)
    assert "'rescale' makes values from " in found


def test_pixels_where_a_normalization_was_adapted_to_fractions_are_named_by_it():
    assert "the inputs of 'standard' vary " in scale_problem(normalized(), IMAGES * 255)


def test_statistics_that_were_never_trained_and_rescalings_inside_say_nothing():
    assert scale_problem(convolutions(trained=False), IMAGES * 255) is None
    inner = keras.Sequential([keras.Input((6, 6, 1)), L.Conv2D(4, 3), L.Rescaling(100.0, name="inner")])
    assert scale_problem(inner, IMAGES * 255) is None


def test_nothing_of_the_model_changes():
    model = convolutions()
    before = [np.array(keras.ops.convert_to_numpy(one)) for one in model.variables]
    scale_problem(model, IMAGES * 255)
    for one, former in zip(model.variables, before, strict=True):
        assert keras.ops.convert_to_numpy(one).tobytes() == former.tobytes()


def two_paths(order=("one", "two")):
    """Returns a network with two inputs, each with a batch normalization that was trained on values in [0, 1]."""
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((6, 6, 1), name=name) for name in order}
    paths = []
    for name in order:
        hidden = L.Conv2D(4, 3, name=f"conv_{name}")(inputs[name])
        hidden = L.BatchNormalization(name=f"norm_{name}", momentum=0.0)(hidden)
        paths.append(L.BatchNormalization(name=f"second_{name}", momentum=0.0)(L.Conv2D(4, 3)(hidden)))
    model = keras.Model(inputs, L.Add()(paths))
    model({"one": IMAGES, "two": IMAGES}, training=True)
    return model


@pytest.mark.parametrize("wrong", ["one", "two"])
def test_the_first_batch_normalization_behind_each_input_is_looked_at(wrong):
    inputs = {"one": IMAGES, "two": IMAGES} | {wrong: IMAGES * 255}
    found = scale_problem(two_paths(), inputs)
    assert f"the inputs of 'norm_{wrong}' vary " in found and found.count(" vary ") == 1
    assert scale_problem(two_paths(), {"one": IMAGES, "two": IMAGES}) is None


def test_a_nested_model_and_doubles_are_followed():
    inner = convolutions()
    image, other = keras.Input((6, 6, 1), name="image"), keras.Input((3,), name="numbers")
    model = keras.Model([image, other], [inner(image), L.BatchNormalization(name="late", momentum=0.0)(other)])
    numbers = np.random.default_rng(1).random(size=(32, 3))
    model([IMAGES, numbers], training=True)
    assert scale_problem(model, [IMAGES, numbers]) is None
    assert "'late'" in scale_problem(model, [IMAGES, numbers * 255])
    assert "'norm'" in scale_problem(model, [IMAGES.astype("float64") * 255, numbers])
