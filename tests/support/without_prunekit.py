"""What a saved model computes in a process that does not import prunekit."""

import subprocess
import sys

import numpy as np

CODE = """\
import sys, keras, numpy as np
model = keras.models.load_model("model.keras")
np.save("found.npy", keras.ops.convert_to_numpy(model(np.load("inputs.npy"))))
assert "prunekit" not in sys.modules
"""


def outputs_of_file(model, inputs, folder):
    """Saves a model of one input and one output in a folder; what it computes where it is loaded again."""
    model.save(folder / "model.keras")
    return outputs_in_folder(inputs, folder)


def outputs_in_folder(inputs, folder):
    """What the model of the file model.keras in a folder computes."""
    np.save(folder / "inputs.npy", inputs)
    subprocess.run([sys.executable, "-c", CODE], cwd=folder, check=True, capture_output=True)
    return np.load(folder / "found.npy")
