"""Files that several modules of tests read."""

import pytest
from integer_networks import made

import prunekit as pk


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """(Quantized, IntegerExport, inputs) of a convolutional network with 8 bits."""
    model, inputs = made("fashion_cnn")
    done = pk.quantize(model, inputs)
    return done, done.export(tmp_path_factory.mktemp("eight") / "m.tflite"), inputs
