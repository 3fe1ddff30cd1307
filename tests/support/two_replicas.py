"""Trainings on one device and on two replicas, in a process of their own: TensorFlow splits a CPU at its start."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

END = """
import sys
from distributed_training import split_cpu, strategy_of
split_cpu(2)
for place, strategy in enumerate([strategy_of("one", 1), strategy_of("mirrored", 2)]):
    np.savez(f"{sys.argv[1]}/{place}.npz", *trained(strategy))
"""


def on_one_and_on_two(program, folder):
    """Returns the arrays of a training on one device, and those on two replicas.

    Args:
        program: Imports numpy as np, and defines `trained(strategy)`, which returns arrays.
        folder: A folder for them.
    """
    path = os.pathsep.join([os.getcwd(), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", program + END, str(folder)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = []
    for place in range(2):
        with np.load(folder / f"{place}.npz") as arrays:
            found.append([arrays[name] for name in arrays.files])
    return found
