"""A `fit` that moves the weights of a quantized model off their grids says so at its end."""

import warnings

import keras
import numpy as np
import pytest
from rounded_models import pair

import prunekit as pk

pytestmark = pytest.mark.every_backend

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(64, 3)).astype("float32")


def compiled(rate=0.1):
    model = pair()
    model.compile(keras.optimizers.SGD(rate), "mse")
    return model


def fit(model, **options):
    return model.fit(X, Y, epochs=1, verbose=0, **options)


def test_a_training_off_the_grids_is_told_once_and_nothing_stays_on_the_model():
    model = compiled()
    done = pk.quantize(model, X)
    with pytest.warns(
        UserWarning, match="moved weights of .* off the grids of its quantization: .*QuantizationCallback"
    ):
        history = fit(model)
    assert history.history["loss"] and "fit" not in vars(model)
    fit(model)
    with pytest.raises(ValueError, match="lie on grids"):
        done.state.check_unchanged()


def test_a_training_with_the_callback_a_frozen_model_and_a_dropped_result_say_nothing():
    model = compiled()
    first = pk.quantize(model, X)
    fit(model, callbacks=[pk.QuantizationCallback(X)])
    model = compiled(rate=0.0)
    still = pk.quantize(model, X)
    fit(model)
    still.state.check_unchanged()
    model = compiled()
    pk.quantize(model, X)
    fit(model)
    assert first.method == "nearest"


def test_the_last_of_two_quantizations_speaks_alone():
    model = compiled()
    kept = [pk.quantize(model, X), pk.quantize(model, X, bits=4)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", UserWarning)
        fit(model)
    assert len([one for one in found if "off the grids" in str(one.message)]) == 1 and len(kept) == 2
