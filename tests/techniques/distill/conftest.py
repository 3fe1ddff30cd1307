"""The teacher of most tests here."""

import pytest
from quantized_training import fit, network


@pytest.fixture(scope="module")
def teacher():
    """A trained network."""
    model = network()
    fit(model, epochs=3)
    return model
