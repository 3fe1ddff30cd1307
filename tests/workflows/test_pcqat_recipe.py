"""The recipe pcqat-digits: pruned, clustered, then trained on integers, up to the codes in its file."""

import json

import numpy as np
import pytest
from backends import tensorflow_only

from prunekit.delivery.litert.tensor_probe import opened
from prunekit.recipe.run.runner import compress

KERNELS = {144, 4608, 32768, 640}


@tensorflow_only
@pytest.mark.thorough
def test_the_codes_of_the_integer_file_are_few_and_most_are_zero(tmp_path):
    compress("pcqat-digits", output=tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert all(row["met"] for row in report["expectations"])
    assert report["metrics"]["accuracy_after"] >= report["metrics"]["accuracy_before"] - 0.01
    interpreter = opened(str(tmp_path / "run" / "exports" / "model-int8.tflite"), {})
    codes = [
        interpreter.get_tensor(one["index"])
        for one in interpreter.get_tensor_details()
        if one["dtype"] is np.int8 and int(np.prod(one["shape"])) in KERNELS and len(one["shape"]) in (2, 4)
    ]
    assert len(codes) == len(KERNELS)
    for array in codes:
        rows = array.reshape(len(array), -1)
        assert (array == 0).mean() >= 0.74 and max(np.unique(row).size for row in rows) <= 8
