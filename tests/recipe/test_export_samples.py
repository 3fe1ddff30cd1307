"""The inputs on which an exported file is compared with the model where there are no data."""

import keras
import numpy as np
import pytest
from keras import layers as L

from prunekit.recipe.state.export_samples import export_samples
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend


def test_without_data_they_have_the_scale_and_the_vocabulary_that_the_model_expects():
    pixels = keras.Input((8, 8, 1), dtype="uint8", name="pixels")
    words = keras.Input((5,), dtype="int32", name="words")
    seen = L.Flatten()(L.Rescaling(1 / 255)(pixels))
    model = keras.Model(
        {"pixels": pixels, "words": words}, L.Dense(3)(L.Concatenate()([seen, L.Flatten()(L.Embedding(50, 2)(words))]))
    )
    samples, labels = export_samples(model, None, 0)
    assert labels is None and {name: len(one) for name, one in samples.items()} == {"pixels": 8, "words": 8}
    assert samples["pixels"].dtype == "uint8" and np.ptp(samples["pixels"]) > 100
    assert 1 < samples["words"].max() < 50
    again, _ = export_samples(model, None, 0)
    assert all((again[name] == samples[name]).all() for name in samples)


def test_a_model_of_a_fixed_batch_size_gets_whole_batches():
    model = keras.Sequential([keras.Input(batch_shape=(5, 3)), L.Dense(2)])
    assert export_samples(model, None, 0)[0].shape == (10, 3)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([keras.Input((None, 3)), L.Dense(2)], r"which is not fully known: \(None, None, 3\)\. Name data \(--data"),
        ([keras.Input((1,), dtype="string"), L.Identity()], r"and the model reads texts\. Name data \(--data"),
        ([L.Dense(2)], r"and the model declares no inputs\. Name data \(--data"),
    ],
    ids=["open", "texts", "not built"],
)
def test_models_for_which_none_can_be_made_need_data(layers, message):
    with pytest.raises(RecipeError, match=message):
        export_samples(keras.Sequential(layers), None, 0)
