"""Reading of scalars: of variables and tensors of every backend, on whichever device."""

import keras
import numpy as np
import pytest
from backends import BACKEND
from keras import ops

from prunekit.core.runtime import backend


@pytest.mark.every_backend
@pytest.mark.parametrize("made", [keras.Variable, ops.convert_to_tensor, np.float32, float])
def test_the_number_of_a_scalar_is_read(made):
    assert backend.number(made(3.0)) == 3.0


@pytest.mark.every_backend
def test_the_number_of_a_tensor_without_numpy_is_read():
    """On PyTorch neither a tensor on a GPU nor one with gradients has an array of NumPy."""
    scalar = ops.convert_to_tensor(3.0)
    if BACKEND == "torch":
        scalar.requires_grad_()
    assert backend.number(scalar) == 3.0
