"""Few bits after training: zeros in the same pass, activation-aware scaling, and bits under a budget."""

from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from studies.quantization import EXAMPLES, NETWORKS, Study
from studies.results import Results, measure_networks

# (sparsity, bits)
SPARSE = ((0.5, 4), (0.5, 3), (0.75, 4), (0.75, 3), (0.9, 4))
ORDERS = ("zeros, then nearest values", "zeros, then GPTQ", "one pass")
BITS = (4, 3)
METHODS = ("nearest", "awq", "gptq")
# Bytes of the weights with chosen bits, between those of 4 bits (0) and of 8 bits (1).
BUDGETS = (0.25, 0.5)
FLOAT = "float32"
PAGE = Path("docs/measured/few-bits.md")
HEAD = f"""# Measured: few bits after training

The networks are those of [quantization](quantization.md), with activations in floating point. The error is the squared
change of the outputs on the 10,000 test images, relative to the variance of the outputs; accuracies are on the same
images, of the model with its weights on grids. {EXAMPLES:,} training images are read, drawn with seed 0; one run each.
`scripts/study few-bits` makes this page.

"""


class FewBits(Study):
    """Measures one network.

    Args:
        name: A key of `NETWORKS`.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self._model = self.dense()
        self._weights = self._model.get_weights()
        self._float = self._outputs()

    def _outputs(self) -> np.ndarray:
        return np.asarray(self._model.predict(self.test[0], batch_size=500, verbose=0))

    def _measured(self) -> dict[str, float]:
        found = self._outputs()
        variance = np.square(self._float - self._float.mean(axis=0)).sum()
        right = found.argmax(-1) == self.test[1].reshape(-1)
        return {"error": float(np.square(found - self._float).sum() / variance), "accuracy": float(right.mean())}

    def sparse(self, sparsity: float, bits: int, order: str) -> dict[str, float]:
        """Error and accuracy with zeros and few bits."""
        self._model.set_weights(self._weights)
        options: dict[str, Any] = {"weights": bits, "activations": None}
        if order == "one pass":
            pk.quantize(self._model, self.images, sparsity=sparsity, **options)
        else:
            pk.prune(self._model, sparsity, self.images, criterion="sparsegpt", allocation="uniform")
            method = "gptq" if order.endswith("GPTQ") else "nearest"
            pk.quantize(self._model, self.images, method=method, **options)
        return self._measured()

    def rounded(self, bits: int, method: str) -> dict[str, float]:
        """Error and accuracy of a method; of the model in floating point for 32 bits."""
        self._model.set_weights(self._weights)
        if bits < 32:
            pk.quantize(self._model, self.images, weights=bits, method=method, activations=None)
        return self._measured()

    def mixed(self, share: float) -> dict[str, float]:
        """Error, accuracy and bytes with bits under a budget."""
        self._model.set_weights(self._weights)
        options: dict[str, Any] = {"activations": None, "method": "gptq"}
        least, most = (
            pk.choose_bits(self._model, self.images, budget=10**9, candidates=(bits,), **options).bytes
            for bits in (4, 8)
        )
        choice = pk.choose_bits(self._model, self.images, budget=round(least + share * (most - least)), **options)
        pk.quantize(self._model, self.images, weights=choice.bits, **options)
        few = sum(bits == 4 for bits in choice.bits.values())
        return {**self._measured(), "bytes": choice.bytes, "least": least, "most": most, "few": few}

    def measure(self) -> dict[str, Any]:
        """Returns all figures of the network."""
        keras.utils.set_random_seed(0)
        return {
            FLOAT: self.rounded(32, ""),
            "sparse": {
                f"{zeros} {bits}": {how: self.sparse(zeros, bits, how) for how in ORDERS} for zeros, bits in SPARSE
            },
            "methods": {str(bits): {method: self.rounded(bits, method) for method in METHODS} for bits in BITS},
            "mixed": {str(share): self.mixed(share) for share in BUDGETS},
        }


def _cell(one: dict[str, float]) -> str:
    return f"{one['error']:.2g} / {one['accuracy']:.4f}"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    measured = {title: results.values[name] for name, title in NETWORKS.items() if name in results.values}
    lines = [HEAD, "## Zeros and few bits", ""]
    lines += [
        "`pk.quantize(model, images, weights=bits, sparsity=zeros)`, the same fraction in each kernel, beside",
        "",
    ]
    lines[-2] += (
        '\n`pk.prune(model, zeros, images, criterion="sparsegpt", allocation="uniform")` and `pk.quantize` after it. '
        "Error / accuracy."
    )
    lines += [f"| network | zeros | bits | {' | '.join(ORDERS)} |", "|---|---:|---:|" + "---:|" * len(ORDERS)]
    for title, found in measured.items():
        for zeros, bits in SPARSE:
            cells = [_cell(found["sparse"][f"{zeros} {bits}"][how]) for how in ORDERS]
            lines.append(f"| {title} | {zeros:.0%} | {bits} | {' | '.join(cells)} |")
    lines += ["", "## Methods", "", "All weights with few bits, no zeros. Error / accuracy; float32: accuracy.", ""]
    lines += ["| network | bits | nearest | awq | gptq | float32 |", "|---|---:|---:|---:|---:|---:|"]
    for title, found in measured.items():
        for bits in BITS:
            cells = [_cell(found["methods"][str(bits)][method]) for method in METHODS]
            lines.append(f"| {title} | {bits} | {' | '.join(cells)} | {found[FLOAT]['accuracy']:.4f} |")
    lines += ["", "## Bits under a budget", ""]
    lines += ["4 or 8 bits for each weight, `pk.choose_bits`, then GPTQ. Bytes: of all weights.", ""]
    lines += [
        "| network | bytes | of 4 bits / of 8 bits | weights with 4 bits | error / accuracy |",
        "|---|---:|---:|---:|---:|",
    ]
    for title, found in measured.items():
        # Where one weight has nearly all bytes, several budgets have the same choice.
        for one in {one["bytes"]: one for one in found["mixed"].values()}.values():
            lines.append(
                f"| {title} | {one['bytes']:,} | {one['least']:,} / {one['most']:,} | {one['few']} | {_cell(one)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures what is missing, and writes the page."""
    measure_networks(__doc__, NETWORKS, PAGE, lambda name: FewBits(name).measure(), page)


if __name__ == "__main__":
    main()
