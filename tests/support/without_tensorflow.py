"""Simulates a machine with JAX or PyTorch and without TensorFlow; runs in its own process."""

import json
import sys

# pytest imports this file as well, in search of doctests.
if __name__ == "__main__":
    for name in ("tensorflow", "tf_keras", "tensorflow_model_optimization", "ai_edge_litert"):
        # Whoever imports it is told that it is not there.
        sys.modules[name] = None

import keras  # noqa: E402
import numpy as np  # noqa: E402

import prunekit as pk  # noqa: E402


def network():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def zeros(model):
    return [int((layer.kernel.numpy() == 0).sum()) for layer in model.layers]


def main(folder):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 4, 64)
    found = {}
    fitted = network()
    pruning = pk.PruningCallback(pk.PolynomialDecay(0.0, 0.75, begin_step=0, end_step=6, frequency=2))
    fitted.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y), callbacks=[pruning])
    found["fit"] = zeros(fitted)
    looped = network()
    with pk.Pruner(looped, pk.ConstantSparsity(0.5, begin_step=0)) as pruner:
        looped.train_on_batch(x, y)
        pruner.step()
    found["loop"] = zeros(looped)
    pruned = network()
    pk.prune(pruned, 0.5, pattern="2:4")
    found["prune"] = zeros(pruned)
    found["inspect"] = round(pk.inspect(fitted).sparsity, 4)
    rows = pk.export(fitted, folder, ["keras", "litert"], x, name="small")
    found["export"] = [(row.format, row.status, row.note) for row in rows]
    found["loaded"] = zeros(keras.saving.load_model(f"{folder}/small.keras"))
    found["tensorflow"] = [name for name in sys.modules if name.startswith("tensorflow.")]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
