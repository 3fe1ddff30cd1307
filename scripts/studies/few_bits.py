"""Few bits after training: zeros in the same pass, activation-aware scaling, bits under a budget, groups of inputs."""

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

import prunekit as pk
from prunekit.delivery.litert.latency import input_arrays, measured_latencies, plain_file
from prunekit.techniques.quantize.quantization_state import unique_weights
from studies.quantization import EXAMPLES, NETWORKS, Study
from studies.results import Results, measure_networks

# (sparsity, bits)
SPARSE = ((0.5, 4), (0.5, 3), (0.75, 4), (0.75, 3), (0.9, 4))
ORDERS = ("zeros, then nearest values", "zeros, then GPTQ")
BITS = (4, 3)
METHODS = ("nearest", "awq", "gptq")
# Bytes of the weights with chosen bits, between those of 4 bits (0) and of 8 bits (1).
BUDGETS = (0.25, 0.5)
# Numbers of inputs that share a scale; None = all inputs of an output.
SIZES = (None, 128, 32)
SECONDS = 10.0
FLOAT = "float32"
# Prices of a bit, for networks with so many zeros before.
PRICES, ZEROS = (0.0, 0.1, 0.2, 0.5, 1.0), (0.0, 0.9)
# Ends of the keys of results of groups, of zeros and few bits in one call, and of prices of bits.
GROUPS, ONE_CALL, PRICED = ", groups", ", one call", ", priced"
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
        self._reduce(sparsity, bits, order)
        return self._measured()

    def one_call(self) -> dict[str, Any]:
        """Error and accuracy of `pk.quantize` with `sparsity`, by zeros and bits."""
        return {f"{zeros} {bits}": self.sparse(zeros, bits, "one call") for zeros, bits in SPARSE}

    def _reduce(self, sparsity: float, bits: int, order: str) -> None:
        self._model.set_weights(self._weights)
        options: dict[str, Any] = {"bits": bits, "activation_bits": "float"}
        if order == "one call":
            pk.quantize(self._model, self.images, sparsity=sparsity, **options)
        else:
            pk.prune(self._model, sparsity, self.images, criterion="sparsegpt", allocation="uniform")
            method = "gptq" if order.endswith("GPTQ") else "nearest"
            pk.quantize(self._model, self.images, method=method, **options)

    def rounded(self, bits: int, method: str) -> dict[str, float]:
        """Error and accuracy of a method; of the model in floating point for 32 bits."""
        self._model.set_weights(self._weights)
        if bits < 32:
            pk.quantize(self._model, self.images, bits=bits, method=method, activation_bits="float")
        return self._measured()

    def mixed(self, share: float) -> dict[str, float]:
        """Error, accuracy and bytes with bits under a budget."""
        self._model.set_weights(self._weights)
        options: dict[str, Any] = {"activation_bits": "float", "method": "gptq"}
        least, most = (
            pk.choose_bits(self._model, self.images, budget=10**9, bits=(bits,), **options).bytes for bits in (4, 8)
        )
        choice = pk.choose_bits(self._model, self.images, budget=round(least + share * (most - least)), **options)
        pk.quantize(self._model, self.images, bits=choice.bits, **options)
        few = sum(bits == 4 for bits in choice.bits.values())
        return {**self._measured(), "bytes": choice.bytes, "least": least, "most": most, "few": few}

    def grouped(self, bits: int, size: int | None, method: str, path: Path) -> dict[str, float]:
        """Error, accuracy and bytes of the file with a scale for each group of inputs; writes the file."""
        self._model.set_weights(self._weights)
        options: dict[str, Any] = {"bits": bits, "method": method, "activation_bits": "float", "group_size": size}
        pk.quantize(self._model, self.images, **options).export(path)
        return {**self._measured(), "bytes": path.stat().st_size}

    def groups(self) -> dict[str, Any]:
        """Returns the figures of groups, with the processor time of files of 4 bits as a ratio to float32."""
        keras.utils.set_random_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            float_file = Path(folder) / "float.tflite"
            self._model.set_weights(self._weights)
            float_file.write_bytes(plain_file(self._model, self.images[:1]))
            found, timed = {}, [float_file]
            for bits in BITS:
                for size in SIZES:
                    for method in ("nearest", "gptq"):
                        path = Path(folder) / f"{bits}-{size}-{method}.tflite"
                        found[f"{bits} {size} {method}"] = self.grouped(bits, size, method, path)
                    timed += [path] if bits == BITS[0] else []
            inputs = input_arrays(self._model, self.images[:1])
            latencies = measured_latencies(timed, [inputs] * len(timed), SECONDS)
        ratios = {str(size): latencies.share(number)[0] for number, size in enumerate(SIZES, 1)}
        return {**found, "time": ratios, "float bytes": len(plain_file(self._model, self.images[:1]))}

    def priced(self) -> dict[str, Any]:
        """Error, accuracy, zeros and bits of an ideal coder with prices of bits, by zeros before, bits and price."""
        found = {}
        for zeros in ZEROS:
            for bits in BITS:
                for price in PRICES:
                    self._model.set_weights(self._weights)
                    if zeros:
                        pk.prune(self._model, zeros, self.images, criterion="sparsegpt", allocation="uniform")
                    done = pk.quantize(self._model, self.images, bits=bits, activation_bits="float", rate=price)
                    found[f"{zeros} {bits} {price}"] = {**self._measured(), **coded(done)}
        return found

    def measure(self) -> dict[str, Any]:
        """Returns all other figures of the network."""
        keras.utils.set_random_seed(0)
        return {
            FLOAT: self.rounded(32, ""),
            "sparse": {
                f"{zeros} {bits}": {how: self.sparse(zeros, bits, how) for how in ORDERS} for zeros, bits in SPARSE
            },
            "methods": {str(bits): {method: self.rounded(bits, method) for method in METHODS} for bits in BITS},
            "mixed": {str(share): self.mixed(share) for share in BUDGETS},
        }


def coded(integers: Any) -> dict[str, float]:
    """Zeros of all weights, and bits of a weight that is coded by the frequencies of the codes of its kernel."""
    size, bits, zeros = 0, 0.0, 0
    for weight in unique_weights(integers.state.placement):
        codes = integers.state.weights[id(weight.variable)].codes(np.asarray(weight.variable))
        shares = np.unique(codes, return_counts=True)[1] / codes.size
        bits -= codes.size * float((shares * np.log2(shares)).sum())
        size, zeros = size + codes.size, zeros + int((codes == 0).sum())
    return {"zeros": zeros / size, "bits": bits / size}


def _cell(one: dict[str, float]) -> str:
    return f"{one['error']:.2g} / {one['accuracy']:.4f}"


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    measured = {title: results.values[name] for name, title in NETWORKS.items() if name in results.values}
    lines = [HEAD, "## Zeros and few bits", ""]
    lines += [
        "One call: `pk.quantize(model, images, bits=bits, sparsity=zeros)`, beside `pk.prune(model, zeros, images,",
        'criterion="sparsegpt", allocation="uniform")` and `pk.quantize` after it. Error / accuracy.',
        "",
        f"| network | zeros | bits | {' | '.join(ORDERS)} | one call |",
        "|---|---:|---:|" + "---:|" * (len(ORDERS) + 1),
    ]
    for name, title in NETWORKS.items():
        found, one_call = results.values.get(name), results.values.get(f"{name}{ONE_CALL}", {})
        for zeros, bits in SPARSE if found else ():
            cells = [_cell(found["sparse"][f"{zeros} {bits}"][how]) for how in ORDERS]
            one = one_call.get(f"{zeros} {bits}")
            cells.append("–" if one is None else _cell(one))
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
    return "\n".join([*lines, *_of_groups(results), *_of_prices(results)]) + "\n"


def _of_groups(results: Results) -> list[str]:
    """Returns the lines about groups."""
    lines = ["", "## Groups of inputs", ""]
    lines += [
        '`pk.quantize(model, images, bits=bits, activation_bits="float", group_size=inputs)`. Error / accuracy; bytes',
        f"of the LiteRT file; for {BITS[0]} bits the processor time of one call as a ratio to float32, batch 1,",
        "one thread, x86.",
        "",
        "| network | bits | inputs that share a scale | nearest | gptq | bytes | time |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, title in NETWORKS.items():
        found = results.values.get(f"{name}{GROUPS}")
        for bits in BITS if found else ():
            for size in SIZES:
                nearest, gptq = (found[f"{bits} {size} {method}"] for method in ("nearest", "gptq"))
                time = f"{found['time'][str(size)]:.2f}" if bits == BITS[0] else ""
                cells = (title, bits, size or "all", _cell(nearest), _cell(gptq), f"{gptq['bytes']:,}", time)
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _of_prices(results: Results) -> list[str]:
    """Returns the lines about prices of bits."""
    lines = ["", "## A price for bits", ""]
    lines += [
        '`pk.quantize(model, images, bits=bits, activation_bits="float", rate=rate)`, after',
        '`pk.prune(model, zeros, images, criterion="sparsegpt", allocation="uniform")` where there are zeros before.',
        "Error / accuracy, and the bits of a weight that is coded by the frequencies of the codes of its kernel.",
        "",
        "| network | zeros before | bits | rate | zeros | bits of a weight | error / accuracy |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, title in NETWORKS.items():
        found = results.values.get(f"{name}{PRICED}", {})
        for key, one in found.items():
            zeros, bits, price = key.split()
            lines.append(
                f"| {title} | {float(zeros):.0%} | {bits} | {float(price):g} | {one['zeros']:.1%} | "
                f"{one['bits']:.2f} | {_cell(one)} |"
            )
    return lines


def _measured(name: str) -> dict[str, Any]:
    kinds = {GROUPS: FewBits.groups, ONE_CALL: FewBits.one_call, PRICED: FewBits.priced}
    end = next((end for end in kinds if name.endswith(end)), "")
    return kinds.get(end, FewBits.measure)(FewBits(name.removesuffix(end)))


def main() -> None:
    """Measures what is missing, and writes the page."""
    names = [f"{name}{end}" for end in ("", GROUPS, ONE_CALL, PRICED) for name in NETWORKS]
    measure_networks(__doc__, names, PAGE, _measured, page)


if __name__ == "__main__":
    main()
