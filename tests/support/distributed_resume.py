"""A worker of a training in which one worker is killed once; started again, all of them resume from the backup.

Run in each worker: `python distributed_resume.py FOLDER VICTIM`. Writes the final weights, and those of an undisturbed
training in the same processes.
"""

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
from distributed_training import ROWS, build, data, strategy_of

import prunekit as pk

ROW = ROWS["adam"]
EPOCHS, DEATH = 5, 7


class Death(keras.callbacks.Callback):
    """Kills this process, as a lost machine would, after its eighth update, in the middle of an epoch; once."""

    def __init__(self, folder, mine):
        super().__init__()
        self._mark, self._mine = Path(folder) / "died", mine

    def on_train_batch_end(self, batch, logs=None):
        if self._mine and self.model.optimizer.iterations.numpy() == DEATH and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(strategy, callbacks):
    """The final weights."""
    with strategy.scope():
        model = build(ROW)
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.8, end_step=12, frequency=2)
    with pk.distribution.across_replicas(model):
        model.fit(
            *data(ROW),
            batch_size=ROW.batch,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, pk.PruningCallback(schedule, allocation="uniform")],
        )
    return model.get_weights()


def main(folder, victim):
    strategy = strategy_of("multi_worker", None)
    index, chief = strategy.cluster_resolver.task_id, pk.distribution.is_chief(strategy)
    # All read the backup, and one writes it: workers that kept one each could resume in different epochs.
    often = "epoch" if chief else sys.maxsize
    backup = keras.callbacks.BackupAndRestore(Path(folder) / "backup", often, delete_checkpoint=chief)
    weights = train(strategy, [backup, Death(folder, index == int(victim))])
    np.savez(Path(folder) / f"resumed-{index}.npz", *weights)
    np.savez(Path(folder) / f"undisturbed-{index}.npz", *train(strategy, []))


if __name__ == "__main__":
    main(*sys.argv[1:])
