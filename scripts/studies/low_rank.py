"""Layers of low rank after training, beside decompositions of weights, plain and scaled by activations; forms."""

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.core.statistics.layer_products import product_of
from prunekit.delivery.litert.latency import input_arrays, measured_latencies, plain_file
from prunekit.techniques.factorize.factorizing import candidates
from prunekit.techniques.factorize.fitting import Fitting
from prunekit.techniques.factorize.low_rank import directions_of
from prunekit.techniques.factorize.options import FactorizeOptions
from prunekit.techniques.factorize.rank_choice import Sizes
from studies import mnist, records
from studies.few_bits import SECONDS, FewBits
from studies.quantization import EXAMPLES, NETWORKS
from studies.results import Results, measure_networks

SHARES = (0.7, 0.5, 0.3)
# Forms of convolutions, shares of the multiply-accumulates, and the end of the keys of their results.
FORMS, MACS = ("channels", "separable", "tucker", "auto"), (0.8, 0.6, 0.4)
BY_FORM = ", forms"
# Networks with windows, whose convolutions have several forms.
WITH_FORMS = [name for name in NETWORKS if name != "mobilenet"]
# Rows of a layer that are read, and that are compared.
ROWS = 20_000
# LeNet-300-100: half of the weights of its first layer, 784 to 300.
FIRST, HALF, SEEDS = "lenet-300-100, first layer", 784 * 300 // (2 * (784 + 300)), 3
PAGE = Path("docs/measured/low-rank.md")
HEAD = f"""# Measured: layers of low rank after training

The networks are those of [quantization](quantization.md), without further training. Accuracies are on the 10,000 test
images; {EXAMPLES:,} training images are read, drawn with seed 0; one run each. The call:
`pk.factorize(model, parameters=share, data=images, form="channels")`. `scripts/study low-rank` makes this page.

"""
FIRST_HEAD = f"""
The first layer of LeNet-300-100 alone, of the dense networks of [records](records.md), with rank {HALF}, half of its
weights (wanted: at most 0.1 points lost): `pk.factorize(model, rank={HALF}, data=images, include="hidden_1")`, then
`pk.quantize(model, images)`.

| seed | dense | low rank | and 8 bits |
|---:|---:|---:|---:|
"""
LAYERS = """
## Error of a layer's outputs

Squared error of each layer's outputs on test images with half of its largest worthwhile rank, relative to that of the
truncated singular value decomposition of the weight (SVD) and of the weight with rows scaled by the root of the mean
magnitude of their inputs (ASVD, Yuan et al. 2023): the largest ratio and the median of the layers. The bias takes over
the mean error of all three.

| network | layers | beside SVD | beside ASVD |
|---|---:|---:|---:|
"""
REASON = """
At most 0.5 beside ASVD was wanted on every layer. More is not possible: of all layers of a rank, these have the least
squared error on the images that were read (Eckart & Young 1936).
"""


FORMS_HEAD = f"""
## Forms of convolutions

`pk.factorize(model, macs=share, data=images, form=form)`. The time is that of a call of the LiteRT file in float32
relative to that of the dense network's file, on one thread, the files in turns for {SECONDS:g} seconds.
Other work ran on the machine: the times are rough.

| network (dense) | MACs | form | forms taken | parameters left | accuracy | time |
|---|---:|---|---|---:|---:|---:|
"""
HALF_HEAD = """
Each convolution alone, with at most half of its weights: squared error of its outputs relative to the outputs, on the
images that were read. "–": the window has no such form.

| network | convolution | channels | separable | tucker |
|---|---|---:|---:|---:|
"""


def truncated(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Returns the nearest matrix of a rank."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


class LowRank(FewBits):
    """Measures one network."""

    def rows(self, target: Any, images: np.ndarray) -> np.ndarray:
        """Rows of the inputs of a layer, a sample."""
        entry = keras.Model(self._model.inputs, target.layer.input)
        rows = np.asarray(product_of(target).rows((entry(images, training=False),)))[0]
        keep = np.random.default_rng(0).permutation(len(rows))[:ROWS]
        return rows[keep].astype("float64")

    def layers(self) -> list[list[float]]:
        """The ratios to SVD and ASVD of each layer."""
        found = []
        for target in candidates(self._model, FactorizeOptions())[0]:
            product = product_of(target)
            matrix = product.matrix(np.asarray(target.variable).astype("float64"))[0]
            rank = product.inputs * product.outputs // (product.inputs + product.outputs) // 2
            if rank < 1:
                continue
            x, fresh = self.rows(target, self.images[:512]), self.rows(target, self.test[0][:512])
            mean = x.mean(axis=0)
            first, second = directions_of((x - mean).T @ (x - mean), matrix).factors(matrix, rank)
            scales = np.maximum(np.sqrt(np.abs(x).mean(axis=0)), 1e-6)[:, None]
            others = truncated(matrix, rank), truncated(scales * matrix, rank) / scales
            errors = [np.square((fresh - mean) @ (matrix - one)).sum() for one in (first @ second, *others)]
            found.append([float(errors[0] / one) for one in errors[1:]])
        return found

    def factorized(self, share: float, data: Any) -> dict[str, Any]:
        """Accuracy and ranks with a share of the parameters."""
        self._model.set_weights(self._weights)
        try:
            smaller, report = pk.factorize(self._model, parameters=share, data=data, form="channels")
        except ValueError as error:
            return {"refused": str(error)}
        found = np.asarray(smaller.predict(self.test[0], batch_size=500, verbose=0))
        right = float((found.argmax(-1) == self.test[1].reshape(-1)).mean())
        return {"accuracy": right, "layers": len(report.layers), "parameters": report.parameters, "macs": report.macs}

    def by_form(self) -> dict[str, Any]:
        """Accuracy, sizes and time with shares of the multiply-accumulates in each form; errors at half a weight."""
        self._model.set_weights(self._weights)
        found: dict[str, Any] = {"dense": self._measured()["accuracy"], "halves": self._halves()}
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / "dense.tflite"]
            files[0].write_bytes(plain_file(self._model, self.images[:1]))
            measured = []
            for key in (f"{share} {form}" for share in MACS for form in FORMS):
                share, form = key.split()
                try:
                    smaller, report = pk.factorize(self._model, macs=float(share), data=self.images, form=form)
                except ValueError as error:
                    found[key] = {"refused": str(error)}
                    continue
                outputs = np.asarray(smaller.predict(self.test[0], batch_size=500, verbose=0))
                right = float((outputs.argmax(-1) == self.test[1].reshape(-1)).mean())
                taken = {one.name: f"{one.form} {'-'.join(map(str, one.ranks))}" for one in report.layers}
                found[key] = {"accuracy": right, "taken": taken, "parameters": report.parameters, "macs": report.macs}
                files.append(Path(folder) / f"{len(files)}.tflite")
                files[-1].write_bytes(plain_file(smaller, self.images[:1]))
                measured.append(key)
            inputs = input_arrays(self._model, self.images[:1])
            latencies = measured_latencies(files, [inputs] * len(files), SECONDS)
        for number, key in enumerate(measured, 1):
            found[key]["time"] = latencies.share(number)[0]
        return found

    def _halves(self) -> dict[str, dict[str, float]]:
        """Errors of each form of each convolution with at most half of its weights."""
        found: dict[str, dict[str, float]] = {}
        convolutions = (keras.layers.Conv1D, keras.layers.Conv2D)
        names = [one.name for one in self._model.layers if isinstance(one, convolutions)]
        for target in candidates(self._model, FactorizeOptions())[0]:
            if target.layer.name in names:
                found[target.name] = self._half(target)
        return found

    def _half(self, target: Any) -> dict[str, float]:
        fitting = Fitting(self._model, [target], FactorizeOptions(), self.images)
        curve = Sizes(self._model).curves([target], fitting.errors(), "auto")[target.name]
        small = [one for one in curve.choices if one.parameters <= target.size / 2]
        best: dict[str, Any] = {}
        for one in sorted(small, key=lambda one: -one.error):
            best[one.structure.form] = one.structure
        return {
            form: fitting.factors({target.name: [structure]}).errors[target.name] for form, structure in best.items()
        }

    def run(self) -> dict[str, Any]:
        """All figures of the network."""
        self._model.set_weights(self._weights)
        found: dict[str, Any] = {"layers": self.layers(), "dense": self._measured()["accuracy"]}
        for share in SHARES:
            found[f"{share} data"] = self.factorized(share, self.images)
            found[f"{share} synthetic"] = self.factorized(share, None)
        return found


def _cell(one: dict[str, Any]) -> str:
    return f"{one['accuracy']:.4f}" if "accuracy" in one else "–"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    lines = [
        "| network (dense) | share of the parameters | factorized layers | MACs left | accuracy | without data |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    ratios = []
    for _, title, found in results.of(NETWORKS):
        for share in SHARES:
            one = found[f"{share} data"]
            counts = [str(one["layers"]), f"{one['macs'][1] / one['macs'][0]:.2f}"] if "macs" in one else ["–", "–"]
            cells = [*counts, _cell(one), _cell(found[f"{share} synthetic"])]
            lines.append(f"| {title} ({found['dense']:.4f}) | {share} | {' | '.join(cells)} |")
        table = np.array(found["layers"])
        ratios.append(
            f"| {title} | {len(table)} | {table[:, 0].max():.2f}, {np.median(table[:, 0]):.2f} | "
            f"{table[:, 1].max():.2f}, {np.median(table[:, 1]):.2f} |"
        )
    accuracy = HEAD + "## Accuracy\n\n" + "\n".join(lines) + "\n"
    first = _first(results.values[FIRST]) if FIRST in results.values else ""
    return accuracy + first + LAYERS + "\n".join(ratios) + "\n" + REASON + _forms(results)


def first_layer() -> list[dict[str, float]]:
    """Accuracies of LeNet-300-100 before, with a first layer of low rank, and with 8 bits as well; one row a seed."""
    (images, labels), test = mnist.images("train"), mnist.images("t10k")
    rows = []
    for seed in range(SEEDS):
        keras.utils.set_random_seed(seed)
        model = records.dense("lenet-300-100", seed, records.Shifted(images, labels, seed))
        smaller, _ = pk.factorize(model, rank=HALF, data=images[:EXAMPLES], include="hidden_1")
        found = {"dense": records.error(model, test), "low rank": records.error(smaller, test)}
        pk.quantize(smaller, images[:EXAMPLES])
        rows.append({name: 1 - error for name, error in (found | {"8 bits": records.error(smaller, test)}).items()})
    return rows


def _first(rows: list[dict[str, float]]) -> str:
    lines = [" | ".join(f"{row[name]:.4f}" for name in ("dense", "low rank", "8 bits")) for row in rows]
    return FIRST_HEAD + "".join(f"| {seed} | {line} |\n" for seed, line in enumerate(lines))


def _forms(results: Results) -> str:
    lines, halves = [], []
    for name in WITH_FORMS:
        title, found = NETWORKS[name], results.values.get(f"{name}{BY_FORM}", {})
        for key in (f"{share} {form}" for share in MACS for form in FORMS if f"{share} {form}" in found):
            (share, form), one = key.split(), found[key]
            cells = ["–"] * 4
            if "accuracy" in one:
                taken = ", ".join(f"{layer.partition('/')[0]} {text}" for layer, text in one["taken"].items())
                left = one["parameters"][1] / one["parameters"][0]
                cells = [taken, f"{left:.2f}", f"{one['accuracy']:.4f}", f"{one['time']:.2f}"]
            lines.append(f"| {title} ({found['dense']:.4f}) | {share} | {form} | {' | '.join(cells)} |")
        for layer, errors in found.get("halves", {}).items():
            cells = [f"{errors[form]:.4f}" if form in errors else "–" for form in FORMS[:-1]]
            halves.append(f"| {title} | {layer.partition('/')[0]} | {' | '.join(cells)} |")
    if not lines:
        return ""
    left = [NETWORKS[name] for name in WITH_FORMS if f"{name}{BY_FORM}" not in results.values]
    lines += ["", f"Not measured: {'; '.join(left)}."] if left else []
    lines += ["", "The kernels of the inverted residuals but one are 1x1 or depthwise, and have no other form."]
    return FORMS_HEAD + "\n".join(lines) + "\n" + HALF_HEAD + "\n".join(halves) + "\n"


def _measured(name: str) -> Any:
    if name == FIRST:
        return first_layer()
    study = LowRank(name.removesuffix(BY_FORM))
    return study.by_form() if name.endswith(BY_FORM) else study.run()


if __name__ == "__main__":
    names = [*NETWORKS, *(f"{name}{BY_FORM}" for name in WITH_FORMS), FIRST]
    measure_networks(__doc__, names, PAGE, _measured, page)
