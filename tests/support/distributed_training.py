"""Trains the rows of the battery on several replicas, and writes what every update left on each of them.

Run as a program: `python distributed_training.py KIND REPLICAS FOLDER ROW...`, KIND being one (on the joined batch),
mirrored, multi_worker (in each worker), or with JAX one_device or data_parallel.
"""

import contextlib
import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk

EPOCHS = 3


@dataclass(frozen=True)
class Row:
    """One training, the same on each kind of distribution."""

    optimizer: Callable[[], Any]
    examples: int = 72
    batch: int = 24
    reduction: str = "sum_over_batch_size"
    options: dict = field(default_factory=dict)
    fits: int = 1
    loop: bool = False
    begin: int = 0
    end: int = 6


O = keras.optimizers  # noqa: E741
ROWS = {
    "sgd": Row(lambda: O.SGD(0.1, momentum=0.9)),
    "adam": Row(lambda: O.Adam(0.01)),
    # 22 examples are 11 + 11, 8 + 8 + 6 or 6 + 6 + 6 + 4: a mean of the replicas' means is another number.
    "ragged": Row(lambda: O.SGD(0.003, momentum=0.9), examples=70, reduction="sum"),
    "second_fit": Row(lambda: O.Adam(0.01), fits=2),
    "loop": Row(lambda: O.SGD(0.1, momentum=0.9), loop=True),
    "movement": Row(lambda: O.SGD(0.1), options={"criterion": "movement"}, begin=2),
    "short": Row(lambda: O.SGD(0.1), end=100),
    "2:4": Row(lambda: O.AdamW(0.01), options={"pattern": "2:4"}),
    "global": Row(lambda: O.RMSprop(0.01), options={"allocation": "global"}),
    "averages": Row(lambda: O.SGD(0.1, use_ema=True)),
    "muon": Row(lambda: O.Muon(0.01)),
    "loss_scale": Row(lambda: O.LossScaleOptimizer(O.SGD(0.1))),
    "accumulated": Row(lambda: O.SGD(0.1, gradient_accumulation_steps=2), end=3),
}


def build(row, seed=3):
    """A small network, compiled; on every process the same, and so is its name."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential([keras.Input((8,), name="features"), *layers], name="network")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=row.reduction)
    model.compile(row.optimizer(), loss, metrics=["accuracy"])
    return model


def data(row):
    """Inputs of 8 features and labels of 4 classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(row.examples, 8)).astype("float32"), rng.integers(0, 4, row.examples)


def schedule_of(row):
    """A few changes of the masks, most of them ending at the sixth update."""
    final = 0.5 if row.options.get("pattern") == "2:4" else 0.8
    return pk.schedules.PolynomialDecay(final_sparsity=final, begin_step=row.begin, end_step=row.end, frequency=2)


def copies(variable):
    """What each replica of this process holds of a variable."""
    value = getattr(variable, "value", variable)
    if hasattr(value, "addressable_shards"):
        return [np.asarray(shard.data) for shard in value.addressable_shards]
    return [np.asarray(part) for part in getattr(value, "values", (value,))]


class Watch:
    """Looks at every replica of this process after each update, with nothing of prunekit's."""

    def __init__(self, model, masks):
        self.model, self._masks = model, masks
        self.digests, self.unequal, self.leaks, self.copies = [], 0, 0, 0

    def look(self):
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        digest, masks = hashlib.sha256(), self._masks()
        slots = [slot for slot in self.model.optimizer.variables if "seed" not in slot.path]
        for variable in [*self.model.trainable_variables, *slots]:
            found = copies(variable)
            self.copies = max(self.copies, len(found))
            self.unequal += sum(one.tobytes() != found[0].tobytes() for one in found)
            digest.update(found[0].tobytes())
        for layer in self.model.layers:
            mask = masks[f"{layer.name}/kernel"]
            self.leaks += sum(int(np.count_nonzero(one[~mask])) for one in copies(layer.kernel))
            digest.update(mask.tobytes())
        self.digests.append(digest.hexdigest())


class Watching(keras.callbacks.Callback):
    """Lets a `Watch` look after every batch of `fit`."""

    def __init__(self, pruning):
        super().__init__()
        self._pruning = pruning
        self.watch = None

    def on_train_batch_end(self, batch, logs=None):
        if self.watch is None:
            self.watch = Watch(self.model, lambda: self._pruning.pruner.masks)
        self.watch.look()


def fitted(row, model, *, workers=False):
    """Trains with `fit`, once or more often with the same callback."""
    x, y = data(row)
    pruning = pk.PruningCallback(schedule_of(row), **{"allocation": "uniform"} | row.options)
    watching = Watching(pruning)
    with pk.distribution.across_replicas(model) if workers else contextlib.nullcontext():
        for _ in range(row.fits):
            options = {"batch_size": row.batch, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
            model.fit(x, y, callbacks=[pruning, watching], **options)
    return pruning.pruner, watching.watch


def looped(row, model, strategy):
    """Trains in a loop with `strategy.run` and a `Pruner`."""
    import tensorflow as tf

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loss(y, model(x, training=True))) / row.batch
        model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    step = tf.function(lambda x, y: strategy.run(replica_step, (x, y)))
    examples = tf.data.Dataset.from_tensor_slices(data(row)).batch(row.batch)
    with strategy.scope():
        # Slots that the compiled step makes itself fail under several replicas, with prunekit or without.
        model.optimizer.build(model.trainable_variables)
        pruner = pk.Pruner(model, schedule_of(row), allocation="uniform")
    watch = Watch(model, lambda: pruner.masks)
    with pruner:
        for _ in range(EPOCHS):
            for batch in strategy.experimental_distribute_dataset(examples):
                step(*batch)
                pruner.step()
                watch.look()
    return pruner, watch


def strategy_of(kind, replicas):
    """Returns the distribution strategy with `scope()`; on TensorFlow also for a single replica."""
    if kind == "data_parallel":
        found = keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu")[:replicas])
        keras.distribution.set_distribution(found)
    if keras.backend.backend() == "jax":
        return None
    import tensorflow as tf

    if kind == "one":
        return tf.distribute.get_strategy()
    if kind == "multi_worker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def split_cpu(count):
    """Splits the CPU into `count` logical devices; must run before TensorFlow initializes its devices."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)


def trained(row, strategy, saved=None, *, workers=False):
    """The facts of one row: arrays by name. The model goes to `saved`, too, if that is given."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build(row)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruner, watch = looped(row, model, strategy) if row.loop else fitted(row, model, workers=workers)
    if saved is not None and pk.distribution.is_chief(strategy):
        model.save(saved)
    facts = {f"weights/{layer.name}/{v.name}": np.asarray(v) for layer in model.layers for v in layer.variables}
    facts |= {f"masks/{name}": mask for name, mask in pruner.masks.items()}
    facts |= {name: np.array(getattr(watch, name)) for name in ("digests", "unequal", "leaks", "copies")}
    facts["notes"] = np.array([str(one.message) for one in caught if "sparsity" in str(one.message)])
    facts["leaks_at_the_end"] = np.array(sum(pruner.audit().values()))
    return facts


def kerass_own_error(strategy, name):
    """What `fit` raises for a row without prunekit."""
    row = ROWS[name]
    with strategy.scope():
        model = build(row)
    try:
        model.fit(*data(row), batch_size=row.batch, verbose=0)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def main(kind, replicas, folder, *names):
    if kind == "mirrored":
        split_cpu(int(replicas))
    strategy = strategy_of(kind, int(replicas))
    mark, index, facts = Path(folder) / f"{kind}-{replicas}", 0, {}
    for name in names:
        saved = f"{mark}.keras" if name == "adam" else None
        found = trained(ROWS[name], strategy, saved, workers=kind == "multi_worker")
        facts |= {f"{name}/{key}": value for key, value in found.items()}
    if kind in ("mirrored", "multi_worker"):
        facts["keras_alone"] = np.array(kerass_own_error(strategy, "adam" if kind == "multi_worker" else "accumulated"))
    if kind == "multi_worker":
        index = strategy.cluster_resolver.task_id
    np.savez(f"{mark}-{index}.npz", **facts)
    print(json.dumps({"backend": keras.backend.backend(), "rows": names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
