"""The built-in recipes that end with a packed file: zeros, integers and bytes, up to the file that comes back."""

import json

import numpy as np
import pytest
from backends import tensorflow_only

import prunekit as pk
from prunekit.delivery.litert.tensor_probe import opened
from prunekit.recipe.run.runner import compress

# Recipe -> largest codes of the kernels, and the least share of zeros among them.
RECIPES = {"packed-digits": (127, 0.89), "four-bits-digits": (7, 0.94), "smallest-digits": (3, 0.79)}


@tensorflow_only
@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_the_packed_file_comes_back_with_zeros_and_few_bits(name, tmp_path):
    compress(name, output=tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert all(row["met"] for row in report["expectations"])
    (row,) = [one for one in report["exports"] if one["format"] == "litert-integer"]
    file = tmp_path / "run" / "exports" / row["file"]
    packed = file.with_name(f"{file.name}.pack")
    assert packed.stat().st_size == row["packed_bytes"] < 0.75 * row["gzip_bytes"]
    assert pk.unpack(packed, tmp_path / "back.tflite").read_bytes() == file.read_bytes()
    interpreter = opened(str(file), {})
    details = interpreter.get_tensor_details()
    kernels = [
        np.asarray(interpreter.get_tensor(one["index"]))
        for one in details
        if one["dtype"] is np.int8 and len(one["shape"]) in (2, 4) and one["quantization_parameters"]["scales"].size > 1
    ]
    largest, zeros = RECIPES[name]
    assert len(kernels) == 4 and max(int(np.abs(kernel).max()) for kernel in kernels) <= largest
    assert np.concatenate([kernel.reshape(-1) for kernel in kernels]).astype(bool).mean() <= 1 - zeros
