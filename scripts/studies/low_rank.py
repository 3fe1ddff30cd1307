"""Layers of low rank after training, beside decompositions of weights, plain and scaled by activations."""

from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.core.statistics.layer_products import product_of
from prunekit.techniques.factorize.factorizing import candidates
from prunekit.techniques.factorize.low_rank import directions_of
from prunekit.techniques.factorize.options import FactorizeOptions
from studies.few_bits import FewBits
from studies.quantization import EXAMPLES, NETWORKS
from studies.results import Results, measure_networks

SHARES = (0.7, 0.5, 0.3)
# Rows of a layer that are read, and that are compared.
ROWS = 20_000
PAGE = Path("docs/measured/low-rank.md")
HEAD = f"""# Measured: layers of low rank after training

The networks are those of [quantization](quantization.md), without further training. Accuracies are on the 10,000 test
images; {EXAMPLES:,} training images are read, drawn with seed 0; one run each. The call:
`pk.factorize(model, parameters=share, data=images)`. `scripts/study low-rank` makes this page.

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
            smaller, report = pk.factorize(self._model, parameters=share, data=data)
        except ValueError as error:
            return {"refused": str(error)}
        found = np.asarray(smaller.predict(self.test[0], batch_size=500, verbose=0))
        right = float((found.argmax(-1) == self.test[1].reshape(-1)).mean())
        return {"accuracy": right, "layers": len(report.layers), "parameters": report.parameters, "macs": report.macs}

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
    for name, title in NETWORKS.items():
        found = results.values.get(name)
        if not found:
            continue
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
    return HEAD + "## Accuracy\n\n" + "\n".join(lines) + "\n" + LAYERS + "\n".join(ratios) + "\n"


if __name__ == "__main__":
    measure_networks(__doc__, NETWORKS, PAGE, lambda name: LowRank(name).run(), page)
