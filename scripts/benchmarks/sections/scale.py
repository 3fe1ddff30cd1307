"""Peak memory and time of inspecting, pruning, saving and exporting models of a million weights and more.

`measure` runs one operation in its own process. `section` and `picture` need no TensorFlow.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import verdict
from benchmarks.machine import peak
from benchmarks.tables import table
from benchmarks.workers import Workers

SIZES = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000, 300_000_000)
LAYERS = 12
OPERATIONS = ("inspect", "prune", "save", "keras", "litert")
TITLES = {
    "inspect": "pk.inspect",
    "prune": "pk.prune to 90 %",
    "save": "model.save (.keras)",
    "keras": "export to .keras, checked",
    "litert": "export to LiteRT",
}
WANTED = 2.5
# Time and memory from one size to the next may differ so much per weight and still be called linear.
LINEAR = 1.5
COMPARED = SIZES[2::2] + SIZES[-1:]


# The worker -----------------------------------------------------------------------------------------------------------


def network(weights: int, layers: int) -> Any:
    """Returns a float32 perceptron of equal square layers without biases with about `weights` random weights."""
    import keras
    import numpy as np

    width = round((weights / layers) ** 0.5)
    inputs = keras.Input((width,))
    outputs = inputs
    for i in range(layers):
        outputs = keras.layers.Dense(width, use_bias=False, kernel_initializer="zeros", name=f"map{i}")(outputs)
    model = keras.Model(inputs, outputs)
    rng = np.random.default_rng(0)
    for layer in model.layers[1:]:
        # Whole: TensorFlow copies a variable at every read from then on, once a part of it has been assigned.
        layer.kernel.assign(rng.standard_normal((width, width), "float32"))
    return model


def measure(operation: str, weights: int, layers: int) -> dict[str, Any]:
    """Measures seconds and bytes of one operation; the bytes include the model.

    The operation runs on a small model first, so that memory that TensorFlow allocates once is not counted.
    """
    do = {"inspect": _inspect, "prune": _prune, "save": _save, "keras": _keras, "litert": _litert}[operation]
    with tempfile.TemporaryDirectory() as folder:
        do(network(20_000, 2), Path(folder) / "small")
        before = peak(reset=True)
        model = network(weights, layers)
        resting = peak(reset=True)
        start = time.perf_counter()
        do(model, Path(folder) / "large")
        seconds = time.perf_counter() - start
        most = peak()
    count = model.count_params()
    return {"weights": count, "seconds": seconds, "peak": most - before, "model": resting - before}


def _inspect(model: Any, path: Path) -> None:
    import prunekit as pk

    pk.inspect(model)


def _prune(model: Any, path: Path) -> None:
    import prunekit as pk

    pk.prune(model, 0.9)


def _save(model: Any, path: Path) -> None:
    model.save(path.with_suffix(".keras"))


def _keras(model: Any, path: Path) -> None:
    _export(model, path, "keras")


def _litert(model: Any, path: Path) -> None:
    _export(model, path, "litert")


def _export(model: Any, path: Path, name: str) -> None:
    import numpy as np

    from prunekit.operations.export import export

    (row,) = export(model, path, np.zeros((2, model.input_shape[-1]), "float32"), [name])
    assert row.status == "ok", row


# The page -------------------------------------------------------------------------------------------------------------


def tasks(smoke: bool) -> list[dict[str, Any]]:
    """One task for each cell of the first table: sizes by operations, and one layer that is the whole model.

    "keeps" says whether TensorFlow keeps the memory that it frees, as it does by default.
    """
    if smoke:
        return [{"operation": one, "weights": 100_000, "layers": LAYERS, "keeps": True} for one in OPERATIONS[:2]]
    most = 100_000_000
    lines = [*((size, LAYERS, True) for size in SIZES), (most, 1, True), (most, LAYERS, False), (most, 1, False)]
    return [
        {"operation": one, "weights": size, "layers": layers, "keeps": keeps}
        for size, layers, keeps in lines
        for one in OPERATIONS
    ]


def collect(workers: Workers, smoke: bool) -> list[dict[str, Any]]:
    """The tasks, each with the figures of a worker process."""
    rows = []
    for task in tasks(smoke):
        arguments = {name: value for name, value in task.items() if name != "keeps"}
        environment = {} if task["keeps"] else {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1"}
        rows.append({"task": task, "found": workers.call(measure, arguments, environment)})
    return rows


def ratio(row: dict[str, Any]) -> float:
    """Peak memory in multiples of the weights' bytes."""
    return row["peak"] / (4 * row["weights"])


def section(rows: list[dict[str, Any]], picture: str) -> str:
    """The section of the page; `rows` are tasks with their figures."""
    everything = [{**row["task"], **row["found"]} for row in rows]
    lines = {}
    for row in everything:
        title = f"{row['weights'] / 1e6:,.0f} M" + (" in one layer" if row["layers"] == 1 else "")
        cells = lines.setdefault(title if row["keeps"] else f"{title}, freed memory returned", {})
        cells.setdefault("model", f"{row['model'] / (4 * row['weights']):.2f}x")
        cells[row["operation"]] = f"{row['seconds']:.1f} s, {ratio(row):.2f}x"
    body = [[title, *(cells.get(one, "") for one in ("model", *OPERATIONS))] for title, cells in lines.items()]
    named = [row for row in everything if row["keeps"]]
    return "\n\n".join(
        [
            "## Scale",
            f"Perceptrons of {LAYERS} equal square layers, float32; each operation runs in its own process. The table "
            "has seconds, and the peak memory without the memory of TensorFlow itself, in multiples of the weights' "
            "bytes; the model itself takes 1x. In small models, memory that does not depend on the model's size "
            "dominates.",
            table(["weights", "the model alone", *TITLES.values()], body),
            f"![Peak memory and time against the number of weights]({picture})",
            f"Wanted: a peak below {WANTED} times the weights' bytes, for models of at least 10 M weights, and for "
            "one layer of 100 M weights.",
            table(["operation", f"peak in {LAYERS} layers", "verdict", "peak in one layer", "verdict"], _peaks(named)),
            f"Wanted: linear time and memory. The table has time and memory per 100 M weights; a row is called linear "
            f"if they differ by less than {LINEAR} times between the sizes.",
            table(["operation", *(f"at {size / 1e6:,.0f} M" for size in COMPARED), "time", "memory"], _slopes(named)),
            *REMARKS,
            *_on_paper(named),
        ]
    )


def _peaks(rows: list[dict[str, Any]]) -> list[list[str]]:
    """For each operation the most memory in several layers and in one, each with a verdict."""
    body = []
    for one in OPERATIONS:
        cells = [TITLES[one]]
        for several in (True, False):
            found = [row for row in rows if row["operation"] == one and (row["layers"] > 1) == several]
            most = max((ratio(row) for row in found if row["weights"] >= 0.9e7), default=None)
            cells += ["", ""] if most is None else [f"{most:.2f}x", verdict(most, WANTED)]
        body.append(cells)
    return body


def _slopes(rows: list[dict[str, Any]]) -> list[list[str]]:
    """For each operation seconds and GB for 100 M weights at each size, and how far they are from being the same."""
    body = []
    for one in OPERATIONS:
        sizes = {row["weights"]: row for row in rows if row["operation"] == one and row["layers"] > 1}
        found = [row for size in COMPARED for count, row in sizes.items() if abs(count / size - 1) < 0.1]
        if len(found) < len(COMPARED):
            body.append([TITLES[one], *[""] * (len(COMPARED) + 2)])
            continue
        seconds = [1e8 * row["seconds"] / row["weights"] for row in found]
        memory = [0.4 * ratio(row) for row in found]
        cells = [f"{time:.2f} s, {most:.2f} GB" for time, most in zip(seconds, memory, strict=True)]
        body.append([TITLES[one], *cells, *(_linear(values) for values in (seconds, memory))])
    return body


def _linear(values: list[float]) -> str:
    factor = max(values) / min(values)
    if factor < LINEAR:
        return f"linear ({factor:.2f})"
    rising = values[-1] > values[0]
    return f"not linear ({factor:.2f}): {'more' if rising else 'less'} per weight in larger models"


REMARKS = (
    "`pk.prune` chooses the masks of one layer after another, and counts a long array in pieces. The "
    "temporary memory therefore depends on the largest layer, but not on the size of the model: pruning a model with "
    "a single layer holds its weights, importances, masks and new weights at the same time. TensorFlow with oneDNN, "
    "the default on x86, does not return freed memory to the system, and cannot always reuse it; therefore a model "
    "with a single layer holds twice its weights before any operation. With `TF_ONEDNN_USE_SYSTEM_ALLOCATOR=1` in the "
    "environment, as in the last rows, large arrays are returned to the system at once; this reduces the memory of "
    "other operations in models with large layers, but not that of `pk.prune`. The check "
    "of a `.keras` file loads the file beside the model, and Keras reads a file whole before it assigns the weights. "
    "Model, file and loaded model take three times the weights, and Keras has no public option that reads the weights "
    "from disk in pieces. Without psutil, Keras saves and loads in memory below 512 MB of weights (with psutil, below "
    "half of the free memory). Above this limit, Keras writes the weights to a file first, copies this file into the "
    "archive, and unpacks the archive to read it. From 100 M to 300 M weights, a save therefore needs less memory and "
    "more time per weight: every byte is written twice and read once. The LiteRT converter holds the weights as read "
    "and as constants. Its memory peaks at the end, when it parses its file in Python and writes it again with equal "
    "buffers stored once.",
)


def _on_paper(rows: list[dict[str, Any]]) -> list[str]:
    """What ten thousand million weights would take, from what one layer took here."""
    one = [ratio(row) for row in rows if row["operation"] == "prune" and row["layers"] == 1]
    if not one:
        return []
    # Of 400 M weights, 1.6 GB; beyond the weights, the masks and those that they change to, which are counted apart.
    way = 1.6 * (one[0] - 1.5)
    return [
        "Calculated memory for 10,000 M weights: float32 weights take 40 GB, masks 10 GB, a second set of masks during "
        f"an update another 10 GB, and the temporary arrays of a layer of 400 M weights on the way {way:.0f} GB (one "
        f"layer took {one[0]:.2f} times its weights above, minus 1.5 for weights and both sets of masks): "
        f"{60 + way:.0f} GB in all for one-shot pruning. Masks of one bit per weight would take 1.25 GB, but every "
        "update would have to unpack them; therefore masks have one byte per weight. "
        f"Training adds gradients (40 GB) and two slots of Adam (80 GB), {180 + way:.0f} GB together. Such a model "
        "must be distributed over several devices, with each mask on the device of its weight; this is not tested "
        "here. A joint allocation holds the importances of all weights at the same time, another 40 GB."
    ]


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the picture: memory and time against weights, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    memory, seconds = figure.subplots(1, 2)
    drawn = [row for row in rows if row["task"]["layers"] > 1 and row["task"]["keeps"]]
    for one in OPERATIONS:
        found = [row["found"] for row in drawn if row["task"]["operation"] == one]
        weights = [row["weights"] for row in found]
        memory.plot(weights, [row["peak"] / 2**20 for row in found], marker="o", markersize=4, label=TITLES[one])
        seconds.plot(weights, [row["seconds"] for row in found], marker="o", markersize=4)
    memory.plot(weights, [4 * n * WANTED / 2**20 for n in weights], "k:", label=f"{WANTED} times the weights")
    for axes, title in ((memory, "peak memory, MiB"), (seconds, "seconds")):
        axes.set(xscale="log", yscale="log", xlabel="weights", title=title)
        axes.grid(alpha=0.3)
    memory.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)
