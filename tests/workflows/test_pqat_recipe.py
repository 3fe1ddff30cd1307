"""The recipe pqat-digits: pruned, then trained on integers, up to the codes in its file."""

import json

import numpy as np
import pytest
from backends import tensorflow_only

from prunekit.delivery.litert.tensor_probe import opened
from prunekit.recipe.run.runner import compress

KERNELS = {"conv_1/kernel": 144, "conv_2/kernel": 4608, "fc/kernel": 32768, "logits/kernel": 640}


@tensorflow_only
@pytest.mark.thorough
def test_a_quarter_of_the_codes_of_the_integer_file_is_left(tmp_path):
    compress("pqat-digits", output=tmp_path / "run")
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert all(row["met"] for row in report["expectations"])
    zeros = {row["name"]: row["zeros"] for row in report["after"]["weights"] if row["name"] in KERNELS}
    pruned = {name: size * 3 // 4 for name, size in KERNELS.items()}
    assert all(zeros[name] >= count for name, count in pruned.items()), zeros
    interpreter = opened(str(tmp_path / "run" / "exports" / "model-int8.tflite"), {})
    codes = [
        interpreter.get_tensor(one["index"])
        for one in interpreter.get_tensor_details()
        if one["dtype"] is np.int8 and int(np.prod(one["shape"])) in KERNELS.values() and len(one["shape"]) in (2, 4)
    ]
    found = {array.size: int((array == 0).sum()) for array in codes}
    assert found == {KERNELS[name]: zeros[name] for name in KERNELS}
    assert report["metrics"]["accuracy_after"] >= report["metrics"]["accuracy_before"] - 0.01
