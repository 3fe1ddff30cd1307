"""Simulates a machine with JAX or PyTorch and without TensorFlow; runs in its own process."""

import csv
import io
import json
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ABSENT = ("tensorflow", "tf_keras", "tensorflow_model_optimization", "tensorflow_text", "ai_edge_litert")


class Without:
    """A finder of modules that finds what another finder finds, except the packages in `ABSENT`.

    With `sys.modules[name] = None`, `importlib.util.find_spec`, which Keras and PyTorch call, would not behave as on a
    machine without the package.
    """

    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)


# pytest imports this file as well, in search of doctests.
if __name__ == "__main__":
    sys.meta_path[:] = map(Without, sys.meta_path)

import keras  # noqa: E402
import numpy as np  # noqa: E402
import yaml  # noqa: E402

import prunekit as pk  # noqa: E402
from prunekit import cli  # noqa: E402
from prunekit.recipe.datasets import csv_files  # noqa: E402

RECIPES = Path(__file__).parents[2] / "recipes"


def network():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(16, "relu", name="hidden"), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def zeros(model):
    return [int((layer.kernel.numpy() == 0).sum()) for layer in model.layers]


def in_python(folder, x, y):
    """Callbacks, loops, one-shot pruning, quantization and export, from Python."""
    found = {}
    fitted = network()
    pruning = pk.PruningCallback(
        pk.schedules.PolynomialDecay(0.0, 0.75, begin_step=0, end_step=6, frequency=2), allocation="uniform"
    )
    fitted.fit(x, y, batch_size=16, epochs=2, verbose=0, validation_data=(x, y), callbacks=[pruning])
    found["fit"] = zeros(fitted)
    looped = network()
    with pk.Pruner(looped, pk.schedules.ConstantSparsity(0.5, begin_step=0), allocation="uniform") as pruner:
        looped.train_on_batch(x, y)
        pruner.step()
    found["loop"] = zeros(looped)
    pruned = network()
    pk.prune(pruned, 0.5, pattern="2:4", allocation="uniform")
    found["prune"] = zeros(pruned)
    found["inspect"] = round(pk.inspect(fitted).sparsity, 4)
    rows = pk.export(fitted, folder, x, ["keras", "litert"], name="small")
    found["export"] = [(row.format, row.status, row.note) for row in rows]
    found["loaded"] = zeros(keras.saving.load_model(f"{folder}/small.keras"))
    pk.quantize(pruned, x)
    found["quantize"] = [after >= before for before, after in zip(found["prune"], zeros(pruned), strict=True)]
    return found


# ---------------------------------------------------------------- recipes


def called(*arguments):
    """The exit code of a command, and its error lines."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = cli.run(list(map(str, arguments)))
    return code, [line for line in errors.getvalue().splitlines() if line.startswith("error")]


def shipped(folder):
    """A copy of a shipped recipe with few epochs and the format keras alone."""
    recipe = yaml.safe_load((RECIPES / "diabetes.yaml").read_text(encoding="utf-8"))
    train, prune, export, _ = recipe["steps"]
    train["train"]["epochs"], prune["prune"]["epochs"] = 1, 2
    prune["prune"]["schedule"]["end"] = {"epochs": 1}
    export["export"]["formats"] = ["keras"]
    recipe["steps"] = [train, prune, export]
    return written(folder / "shipped.yaml", recipe)


def written(path, recipe):
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return path


def of_own_data(folder, data):
    """A recipe that trains and prunes the network's file on data."""
    compile_settings = {"optimizer": "adam", "batch_size": 16, "from_logits": True}
    steps = [{"train": {"epochs": 1}}, {"prune": {"sparsity": 0.5, "allocation": "uniform", "repair": "none"}}]
    recipe = {"version": 1, "name": "own", "model": {"file": str(folder / "small.keras")}, "data": data}
    return {**recipe, "compile": compile_settings, "steps": steps}


def rows_of(folder, x, y):
    path = folder / "rows.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"x{i}" for i in range(x.shape[1])), "label"])
        writer.writerows([*row, int(label)] for row, label in zip(x.tolist(), y, strict=True))
    return {"csv": str(path), "label": "label", "validation": 0.25}


def from_recipes(folder, x, y):
    """Exit code and error lines of commands on recipes."""
    recipe = shipped(folder)
    found = {"check": called("check", recipe, "--plan"), "compress": called("compress", recipe, "-o", folder / "run")}
    found["report"] = called("report", folder / "run")
    rows = rows_of(folder, x, y)
    normalized = of_own_data(folder, {**rows, "preprocessing": ["Normalization"]})
    # In memory, and in a memory-mapped file.
    for name, limit in (("csv", csv_files.IN_MEMORY), ("csv on disk", 0)):
        csv_files.IN_MEMORY = limit
        found[name] = called("compress", written(folder / "own.yaml", normalized), "-o", folder / name)
    (folder / "images").mkdir()
    needing = {
        "images": {"images": str(folder / "images"), "size": [8, 8]},
        "tfds_saved": {"tfds_saved": str(folder / "images")},
        "lookup": {**rows, "preprocessing": ["IntegerLookup"]},
    }
    for name, data in needing.items():
        path = written(folder / "refused.yaml", of_own_data(folder, data))
        found[name] = called("check", path, "--plan")
    return found


def refused(use):
    try:
        use()
    except ModuleNotFoundError as error:
        return str(error)
    return "not refused"


def main(folder):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype("float32"), rng.integers(0, 4, 64)
    found = in_python(folder, x, y)
    # So few epochs are warned about.
    with warnings.catch_warnings(action="ignore"):
        found["recipes"] = from_recipes(Path(folder), x, y)
    found["gradients"] = refused(lambda: pk.gradients.hvp)
    found["tensorflow"] = [name for name in sys.modules if name.partition(".")[0] in ABSENT]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
