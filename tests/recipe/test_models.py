import zipfile

import keras
import numpy as np
import pytest

from prunekit.anatomy.files.digests import model_digest, weight_arrays
from prunekit.recipe.settings.schema import ModelSource
from prunekit.recipe.state.models import MODELS, build_model, check_model_file, load_model
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend

WEIGHTS = {"digits-cnn": 38_282, "fashion-mlp": 266_610, "fashion-cnn": 421_642}


def test_the_built_in_model_of_a_regression_has_one_output_in_the_unit_of_the_target():
    model = build_model(ModelSource(builtin="diabetes-mlp"), seed=1)
    assert model.count_params() == 2_817 and "2,817 weights" in (MODELS["diabetes-mlp"].__doc__ or "")
    outputs = keras.ops.convert_to_numpy(model(np.zeros((2, 10))))
    np.testing.assert_array_equal(outputs, [[152.0], [152.0]])


@pytest.mark.parametrize("name", WEIGHTS)
def test_built_in_models_have_named_layers_and_as_many_weights_as_they_say(name):
    model = build_model(ModelSource(builtin=name), seed=1)
    assert model.count_params() == WEIGHTS[name] and f"{WEIGHTS[name]:,} weights" in (MODELS[name].__doc__ or "")
    assert {"logits", "probabilities"} <= {layer.name for layer in model.layers}
    assert model.output_shape == (None, 10)
    outputs = keras.ops.convert_to_numpy(model(np.zeros((2, *model.input_shape[1:]))))
    np.testing.assert_allclose(outputs.sum(axis=-1), 1.0, rtol=1e-5)


def test_the_seed_alone_decides_the_weights_that_a_model_starts_from():
    first, again, other = (build_model(ModelSource(builtin="digits-cnn"), seed) for seed in (1, 1, 2))
    assert model_digest(first) == model_digest(again) != model_digest(other)
    assert list(weight_arrays(first))[:2] == ["conv_1/kernel", "conv_1/bias"]


def test_a_keras_file_comes_back_with_its_weights(tmp_path, perceptron):
    perceptron.save(tmp_path / "model.keras")
    assert model_digest(load_model(tmp_path / "model.keras")) == model_digest(perceptron)
    assert model_digest(build_model(ModelSource(file=str(tmp_path / "model.keras")), seed=5)) == model_digest(
        perceptron
    )


@pytest.mark.one_backend
def test_files_that_cannot_be_models_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="model.keras does not exist"):
        check_model_file(tmp_path / "model.keras")
    with pytest.raises(RecipeError, match="only .keras files are read"):
        check_model_file(tmp_path / "model.h5")
    (tmp_path / "model.keras").write_bytes(b"\x89HDF nonsense")
    with pytest.raises(RecipeError, match="is not a .keras file: it is damaged"):
        load_model(tmp_path / "model.keras")


@pytest.mark.parametrize("missing", ["config.json", "model.weights.h5"])
@pytest.mark.one_backend
def test_archives_without_a_part_are_refused_in_one_line(tmp_path, perceptron, missing):
    perceptron.save(tmp_path / "whole.keras")
    with zipfile.ZipFile(tmp_path / "whole.keras") as whole, zipfile.ZipFile(tmp_path / "cut.keras", "w") as cut:
        for name in whole.namelist():
            if name != missing:
                cut.writestr(name, whole.read(name))
    with pytest.raises(RecipeError, match="cut.keras cannot be read: ") as raised:
        load_model(tmp_path / "cut.keras")
    assert "\n" not in str(raised.value)


@pytest.mark.one_backend
def test_damaged_bytes_inside_an_archive_are_refused(tmp_path, perceptron):
    perceptron.save(tmp_path / "model.keras")
    content = bytearray((tmp_path / "model.keras").read_bytes())
    at = content.index(perceptron.layers[0].kernel.numpy().tobytes())
    content[at] ^= 0xFF
    (tmp_path / "model.keras").write_bytes(content)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_model(tmp_path / "model.keras")


@pytest.mark.one_backend
def test_code_inside_a_file_is_not_run(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda inputs: inputs * 2)])
    model.save(tmp_path / "model.keras")
    with pytest.raises(RecipeError, match="it holds Python code .* build the model in a factory"):
        load_model(tmp_path / "model.keras")


@pytest.mark.one_backend
def test_classes_that_are_not_known_here_are_named(tmp_path):
    class Doubling(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 2

    keras.Sequential([keras.Input((3,)), Doubling()]).save(tmp_path / "model.keras")
    with pytest.raises(RecipeError, match="it needs Doubling, which is not registered here"):
        load_model(tmp_path / "model.keras")


@pytest.mark.one_backend
def test_a_factory_that_returns_no_keras_model_is_refused():
    with pytest.raises(RecipeError, match="returns a Keras 3 model. Received: collections.OrderedDict"):
        build_model(ModelSource(factory="collections:OrderedDict"), seed=0)
