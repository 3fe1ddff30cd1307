"""The smallest file for a drop: all techniques together, beside each at its best setting."""

import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import prunekit as pk
from studies.quantization import Study
from studies.results import Results, measure_networks

NETWORKS = {
    "mnist": "MNIST, convolutions",
    "resnet8": "Fashion-MNIST, ResNet-8",
    "mobilenet": "Fashion-MNIST, inverted residuals",
    "attention": "Fashion-MNIST, attention",
}
DROP, EXAMPLES, EPOCHS, BATCH = 0.005, 9000, 2, 128
# A step of the inverted residuals takes a second: nine trainings on all images would take three hours.
TRAINED = {"mobilenet": 15_000}
CHANNELS, RANKS, BITS, ZEROS = ("shrink",), ("factorize",), ("quantize",), ("prune",)
STORED = {"channels": CHANNELS, "low rank": RANKS, "bits": BITS, "together": (*CHANNELS, *RANKS, *BITS)}
PACKED = {
    "channels": CHANNELS,
    "low rank": RANKS,
    "bits": BITS,
    "zeros": ZEROS,
    "zeros and bits": (*ZEROS, *BITS),
    "together": (*CHANNELS, *RANKS, *BITS, *ZEROS),
}
# What is minimised -> techniques by name.
WAYS: dict[str, dict[str, tuple[str, ...]]] = {
    "litert": STORED,
    "packed": PACKED,
    "fast": STORED,
    "packed, trained": {name: PACKED[name] for name in ("bits", "zeros", "together")},
    "fast, trained": {name: STORED[name] for name in ("channels", "together")},
}
TITLES = {"litert": "LiteRT file", "packed": "packed file", "packed, trained": "packed file, trained"}
RUNS = [f"{name}; {goal}; {way}" for name in NETWORKS for goal, ways in WAYS.items() for way in ways]
SEARCHES, BOUNDS, HELD = 20, (0.005, 0.01, 0.02, 0.03, 0.05), "digits; held"
LARGE = "mobilenetv2; time"
PAGE = Path("docs/measured/search.md")
HEAD = f"""# Measured: search

`pk.search(model, (images, labels), drop={DROP:g}, target=..., techniques=...)`: the smallest file that loses at most
half a point, of networks trained elsewhere or by `scripts/study`. {EXAMPLES:,} training images are read, drawn with
seed 0; all files have 8-bit activations, and weights of 8 bits where bits are not chosen. Each technique alone is
searched by the same exact choice, so that it stands at its best setting. "Trained": `training={{"epochs": {EPOCHS}}}`
on the other training images, {TRAINED["mobilenet"]:,} of them for the inverted residuals.

"Drop": on the held-out images, which accept or reject each file; "test": accuracy on the 10,000 test images, used for
this alone. "Files": made and run by the search; "ranks": rank correlation of their predicted and measured errors, where
none was trained. Seconds on two shared cores, other programs running; without them, all techniques on packed files of
MNIST took 194. One run each. `scripts/study search` makes this page; runs that are not listed were not measured. A
training gives another network on another processor: rows whose dense accuracies differ are of two networks.

| network (dense, test) | bytes of | techniques | bytes | / best alone | drop | test | files | ranks | seconds |
|---|---|---|---:|---:|---:|---:|---:|---:|---:|
"""
# A packed file that is hardly smaller than that of bits alone, and the shares of its bytes that are near it.
CLOSE, NEAR = "mobilenet; packed; together", (0.97, 1.02)
# Time of the files of bits alone as a share of that in float32, as it was on another processor.
ELSEWHERE = (0.34, 0.31, 0.73, 0.84)
FAST = """
## Latency

`profile="fast"`: milliseconds of a call of the LiteRT file, one thread, and of the model's file in float32 on the same
machine. Other machines share its processors: a first run of "MNIST, channels, trained", in a slow phase, gave 0.52 of
the time in float32, where the row has 0.43.

| network (dense, test) | techniques | ms | in float32 | / best alone | bytes | drop | test | files | seconds |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""


def measured(run: str) -> Any:
    """Returns bytes, drop, accuracy and time of one search."""
    if run == HELD:
        return held()
    if run == LARGE:
        return large()
    name, goal, way = run.split("; ")
    study = Study(name)
    drawn = np.sort(np.random.default_rng(0).choice(len(study.train[1]), EXAMPLES, replace=False))
    rest = np.setdiff1d(np.arange(len(study.train[1])), drawn)
    rest = rest[: TRAINED.get(name)]
    data, others = ((study.train[0][rows], study.train[1][rows].reshape(-1)) for rows in (drawn, rest))
    training = {"epochs": EPOCHS, "data": others, "batch_size": BATCH} if goal.endswith("trained") else None
    begin = time.perf_counter()
    found = pk.search(
        study.dense(),
        data,
        drop=DROP,
        target="packed" if goal.startswith("packed") else "litert",
        profile="fast" if goal.startswith("fast") else "small",
        techniques=WAYS[goal][way],
        training=training,
    )
    seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.tflite")
        path.write_bytes(found.file)
        test = study.accuracy(path)
    report = found.report
    return {
        "bytes": report.bytes,
        "drop": round(report.drop, 5),
        "test": test,
        "files": len(report.points),
        "ranks": report.rank_correlation,
        "seconds": round(seconds),
        "call": report.seconds,
        "before": report.seconds_before,
        "points": [(one.bytes, round(one.drop, 5)) for one in report.points],
        "alone": {one.techniques: round(one.bytes) for one in report.alone},
        "dense": dense_accuracy(name),
    }


def held() -> list[dict[str, float]]:
    """Returns bound and drops of searches with other seeds, bounds and targets, of a network for the digits."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).reshape(-1, 8, 8, 1).astype("float32"), labels[order]
    keras.utils.set_random_seed(0)
    conv = keras.layers.Conv2D(16, 3, activation="relu")
    dense = [keras.layers.Dense(48, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((8, 8, 1)), conv, keras.layers.Flatten(), *dense])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(images[:600], labels[:600], epochs=15, verbose=0)
    rows = []
    for seed in range(SEARCHES):
        bound, target = BOUNDS[seed % len(BOUNDS)], ("litert", "packed")[seed % 2]
        found = pk.search(model, (images[600:1300], labels[600:1300]), drop=bound, target=target, seed=seed)
        before, after = (
            float((np.asarray(one.predict(images[1300:], verbose=0)).argmax(-1) == labels[1300:]).mean())
            for one in (model, found.model)
        )
        rows.append({"bound": bound, "judged": found.report.drop, "unseen": before - after})
    return rows


def large() -> dict[str, float]:
    """Returns the seconds of a search of MobileNetV2 without trained weights, on noise."""
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2((96, 96, 3), weights=None, classes=10)
    noise = np.random.default_rng(0).normal(size=(1500, 6, 6, 3))
    images = noise.repeat(16, axis=1).repeat(16, axis=2).astype("float32")
    told: list[tuple[float, str]] = []
    begin = time.perf_counter()
    found = pk.search(
        model, images, drop=0.5, progress=lambda done, total, text: told.append((time.perf_counter() - begin, text))
    )
    scanned = max(seconds for seconds, text in told if text.startswith("measured"))
    rows = len(found.report.weights) + len(found.report.groups)
    return {"scan": scanned, "whole": time.perf_counter() - begin, "files": len(found.report.points), "rows": rows}


def dense_accuracy(name: str) -> float:
    """Accuracy of a network before, on the test images."""
    study = Study(name)
    found = study.dense().predict(study.test[0], batch_size=500, verbose=0)
    return float((np.asarray(found).argmax(-1) == study.test[1].reshape(-1)).mean())


def page(results: Results) -> str:
    """Returns the page."""
    rows, fast = [], []
    shares: dict[str, list[float]] = {}
    for run in RUNS:
        if run not in results.values:
            continue
        found, (name, goal, way) = results.values[run], run.split("; ")
        dense = found["dense"]
        cost = "call" if goal.startswith("fast") else "bytes"
        keys = (f"{name}; {goal}; {other}" for other, used in WAYS[goal].items() if len(used) == 1)
        alone = [_least(results.values[key], cost) for key in keys if key in results.values]
        share = f"{_least(found, cost) / min(alone):.2f}" if alone else "–"
        if way == "together" and alone:
            kind = f"{cost}, trained" if goal.endswith("trained") else cost
            shares.setdefault(kind, []).append(_least(found, cost) / min(alone))
        network, drop, test = f"{NETWORKS[name]} ({dense:.4f})", f"{found['drop']:.4f}", f"{found['test']:.4f}"
        way += ", trained" * (goal == "fast, trained")
        if cost == "call":
            times = (f"{1000 * found['call']:.3f}", f"{1000 * found['before']:.3f}", share, f"{found['bytes']:,}")
            fast.append(
                f"| {' | '.join((network, way, *times, drop, test))} | {found['files']} | {found['seconds']} |\n"
            )
            continue
        # Of the trained rows, those of the older reports have the trained files among them.
        ranks = "–" if found["ranks"] is None or goal.endswith("trained") else f"{found['ranks']:.2f}"
        cells = (network, TITLES[goal], way, f"{found['bytes']:,}", share, drop, test, str(found["files"]), ranks)
        rows.append(f"| {' | '.join(cells)} | {found['seconds']} |\n")
    text = HEAD + "".join(rows) + _wanted(shares, "bytes", 0.8) + _chance(results.values.get(CLOSE, {}))
    text += FAST + "".join(fast) + _wanted(shares, "call", 0.9) + _calls(results) if fast else ""
    text += _held(results.values[HELD]) if HELD in results.values else ""
    return text + (_large(results.values[LARGE]) if LARGE in results.values else "")


def _least(found: dict[str, Any], cost: str) -> float:
    """Returns what is minimised: bytes, or the time as a share of that in float32, measured in turns with it."""
    return float(found["call"] / found["before"] if cost == "call" else found[cost])


def _wanted(shares: dict[str, list[float]], cost: str, wanted: float) -> str:
    """Returns what all techniques together take of the best single one."""
    listed, trained = (
        ", ".join(f"{one:.2f}" for one in sorted(shares.get(kind, []))) for kind in (cost, f"{cost}, trained")
    )
    if not listed:
        return ""
    what = {"bytes": "bytes", "call": "time"}[cost]
    told = f"{listed}; trained {trained}" if trained else listed
    return f"""
Together: {told}
of the {what} of the best technique alone (wanted: at most {wanted}).
"""


def _chance(found: dict[str, Any]) -> str:
    """Returns why a network without training gains little from all techniques together."""
    if "points" not in found:
        return ""
    size = found["bytes"]
    near = [(one, drop) for one, drop in found["points"] if NEAR[0] * size <= one <= NEAR[1] * size]
    sizes, drops = ([f(values) for f in (min, max)] for values in zip(*near, strict=True))
    return f"""
Without training, the smaller networks need what they have: at the error of the packed file of the inverted residuals,
bits alone would have {found["alone"]["quantize"] / size:.2f} of its bytes. The rest is chance: {len(near)} files of
{sizes[0] / 1000:.1f} to {sizes[1] / 1000:.1f} kB lose {drops[0]:.4f} to {drops[1]:.4f} on the images that choose.
"""


def _calls(results: Results) -> str:
    """Returns why little time is saved, and that processors differ."""
    rows = (results.values.get(f"{name}; fast; bits") for name in NETWORKS)
    here, there = (
        ", ".join(f"{one:.2f}" for one in shares)
        for shares in ((_least(row, "call") for row in rows if row), ELSEWHERE)
    )
    return f"""
The networks for Fashion-MNIST have short calls: at half a point few channels can go, and ranks and bits save little
time beside them. The processor matters more. On this one (x86-64 with AMX), the files of bits alone take
{here} of the time in float32, in the order of the table; on an earlier one, the same searches gave
{there}. A report has a note where integers are slower than float32.
"""


def _large(found: dict[str, float]) -> str:
    """Returns how long a large model takes."""
    return f"""
## A large model

MobileNetV2 of `keras.applications` at 96 x 96 pixels, without trained weights, on 1,500 images of noise, for a LiteRT
file: the table of {found["rows"]:.0f} weights and groups takes {found["scan"] / 60:.1f} minutes, the search with
{found["files"]:.0f} files {found["whole"] / 60:.1f}.
"""


def _held(rows: list[dict[str, float]]) -> str:
    """Returns how often the drop held."""
    judged = sum(one["judged"] <= one["bound"] for one in rows)
    unseen = np.array([one["unseen"] - one["bound"] for one in rows])
    over, worst, count = max(float(unseen.max()), 0.0), round(497 * max(unseen.max(), 0)), len(rows)
    images = f"{worst} images" if worst else "less than one image"
    within = int((unseen <= 0).sum())
    return f"""
## Other seeds and bounds

{count} searches of a small network for the digits, with seeds 0 to {count - 1}, drops of {min(BOUNDS):g} to
{max(BOUNDS):g}, in turns of both targets, on 700 images of which about 180 judge. The drop held on these in {judged} of
{count}, as it must: no other file is delivered. On 497 images that no search was given, the model on the file's grids
is within the drop in {within}, and at most {over:.4f} above it ({images}).
"""


if __name__ == "__main__":
    measure_networks(__doc__, [*RUNS, HELD, LARGE], PAGE, measured, page)
