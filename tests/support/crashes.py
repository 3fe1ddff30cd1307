"""Callbacks that end a training by an error."""

import keras


class Crash(keras.callbacks.Callback):
    """Raises when an epoch, or a batch of the first epoch, begins."""

    def __init__(self, epoch=None, batch=None):
        super().__init__()
        self.epoch, self.batch = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("the machine is gone")

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self.batch:
            raise RuntimeError("the machine is gone")
