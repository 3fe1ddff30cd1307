"""What layers lose whose inputs are read at a sample of positions: pruning and rounding of small trained networks."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import prunekit as pk
from prunekit.core.statistics import layer_inputs
from studies import kinds
from studies.results import Results, measure_networks

NETWORKS = ("digits-cnn", "unet", "fashion-resnet8")
EXAMPLES, DRAWS = (64,), 3
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "SparseGPT, 80 % zeros": lambda model, x: pk.prune(model, 0.8, x, criterion="sparsegpt"),
    "default, 80 % zeros": lambda model, x: pk.prune(model, 0.8, x),
    "GPTQ, 3 bits": lambda model, x: pk.quantize(model, x, bits=3, activation_bits="float", method="gptq"),
}
# Least rows of an example: all; the sample of `sampled_rows`, whose lower bound of 1,024 is left out.
ROWS = {"all": 1 << 30, "2 K": 1}
PAGE = Path("docs/measured/row-sampling.md")
HEAD = f"""# Measured: rows from a sample of positions

Layers with more than 2,048 positions in each example, and more than 4 K, where K is the number of a layer's inputs, are
fitted to a [sample](../after-training.md#memory-and-time) of the larger of 1,024 and 2 K of them. The networks here
have fewer positions, so that all can be read. Beside them stands the smallest sample of that rule: 2 K positions of
each example in every layer that has more than 4 K. What the networks keep, from a number of examples: mean of {DRAWS}
draws of the examples, the range of the draws with all positions, and the difference with its standard error.
`scripts/study row-sampling` makes this page.

| Network | Operation | Examples | All positions | Range of the draws | 2 K positions | Difference |
|---|---|---|---|---|---|---|
"""


@contextlib.contextmanager
def _rows(least: int) -> Iterator[None]:
    """Context manager in which samples have at least so many rows of an example."""
    before = layer_inputs._SAMPLED
    layer_inputs._SAMPLED = least
    try:
        yield
    finally:
        layer_inputs._SAMPLED = before


def measured(name: str) -> dict[str, float]:
    """Returns "OPERATION / EXAMPLES / ROWS / DRAW" -> score, and "dense", for one network."""
    inputs = kinds.KINDS[name].data()[0][0]
    found = {"dense": kinds.score(name, kinds.trained(name))}
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(len(inputs))
        for count in EXAMPLES:
            x = inputs[order[:count]]
            for operation, run in OPERATIONS.items():
                for rows, least in ROWS.items():
                    model = kinds.trained(name)
                    with _rows(least):
                        run(model, x)
                    found[f"{operation} / {count} / {rows} / {draw}"] = kinds.score(name, model)
    return found


def page(results: Results) -> str:
    """Returns the page as Markdown."""
    rows = []
    for name in NETWORKS:
        found = results.values.get(name)
        for operation in OPERATIONS if found else ():
            for count in EXAMPLES:
                keys = [[f"{operation} / {count} / {read} / {draw}" for draw in range(DRAWS)] for read in ROWS]
                each = [np.array([found[key] for key in column]) for column in keys]
                change = each[1] - each[0]
                error = change.std(ddof=1) / np.sqrt(DRAWS)
                title = f"{kinds.KINDS[name].title} ({found['dense']:.4f} dense)"
                rows.append(
                    f"| {title} | {operation} | {count} | {each[0].mean():.4f} | {np.ptp(each[0]):.4f} "
                    f"| {each[1].mean():.4f} | {change.mean():+.4f} ± {error:.4f} |"
                )
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    """Measures what is missing, and writes the page."""
    measure_networks(__doc__, NETWORKS, PAGE, measured, page)


if __name__ == "__main__":
    main()
