"""A training in `fit` that is interrupted and resumed, beside one that is not."""

import keras
import numpy as np
import pytest
from crashes import Crash
from quantized_training import fit, network

import prunekit as pk


def crashed(folder, *callbacks, epoch=1, **options):
    """Trains the network with a backup, until the machine is gone as an epoch begins."""
    with pytest.raises(RuntimeError, match="the machine is gone"):
        resumed(folder, *callbacks, Crash(epoch), **options)


def resumed(folder, *callbacks, **options):
    """Returns the network, trained from its backup on if there is one."""
    model = network()
    fit(model, keras.callbacks.BackupAndRestore(str(folder)), *callbacks, **options)
    return model


def whole_and_resumed(folder, make):
    """Trains to the end, and once more with an interruption; both must end with the same weights.

    Args:
        folder: Folder for the backups.
        make: Returns the callbacks of a run; takes a PruningCallback that has begun when the run is interrupted.

    Returns:
        The callbacks of the whole and of the resumed run.
    """
    runs = []
    for _ in range(3):
        schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, begin_step=1, end_step=20, frequency=3)
        runs.append(make(pk.PruningCallback(schedule, allocation="uniform")))
    whole = resumed(folder / "whole", *runs[0], epochs=4)
    crashed(folder / "cut", *runs[1], epoch=2, epochs=4)
    again = resumed(folder / "cut", *runs[2], epochs=4)
    for one, two in zip(again.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    return runs[0], runs[2]
