"""Implements scripts/leak-matrix: runs the leak matrix and writes its table into the documentation."""

import argparse
import importlib.metadata
import platform
import shlex
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import leak_matrix
from backends import BACKEND
from leak_matrix import LOOPS, OPTIMIZERS, VARIANTS, Cell, Outcome

DOCUMENT = Path(__file__).parents[2] / "docs" / "leak-matrix.md"
SIGNS = {"ok": "ok", "keras": "Keras", "refused": "refused", "failed": "**FAILED**"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cells, prints progress, writes the table; returns 1 where a cell failed."""
    parser = argparse.ArgumentParser(prog="scripts/leak-matrix", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes to run the cells in (default 1)")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="VALUE", help="run only the cells with these values, write no table"
    )
    parser.add_argument("--cover", action="store_true", help="run the subset that the tests run, write no table")
    document_here = DOCUMENT if BACKEND == "tensorflow" else None
    parser.add_argument("--output", type=Path, default=document_here, help="path of the page with the table")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time limit; the table marks the cells that did not run"
    )
    options = parser.parse_args(arguments)

    if options.output is None and not (options.only or options.cover):
        parser.error(f"docs/leak-matrix.md has TensorFlow's table: give the path of the {BACKEND} table with --output")
    # The covering subset runs first, so a run that ends early has covered every pair of values.
    cells = leak_matrix.cover()
    if not options.cover:
        cells = [*cells, *(cell for cell in leak_matrix.product() if cell not in set(cells))]
    cells = [cell for cell in cells if set(options.only) <= {cell.optimizer, cell.variant, cell.loop}]
    if not cells:
        parser.error(f"no cell has all of these values: {options.only}")
    outcomes, seconds = _run(cells, options.jobs, 60 * options.minutes)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"FAILED {outcome.cell}: {outcome.reason}", flush=True)
    if not (options.only or options.cover):
        command = shlex.join(["scripts/leak-matrix", *(sys.argv[1:] if arguments is None else arguments)])
        options.output.parent.mkdir(exist_ok=True)
        options.output.write_text(document(outcomes, command, seconds))
        print(f"{options.output} written", flush=True)
    return int(bool(failed))


def _run(cells: Sequence[Cell], jobs: int, limit: float) -> tuple[list[Outcome], float]:
    start, outcomes = time.perf_counter(), []
    for number, outcome in enumerate(leak_matrix.run_cells(cells, jobs), 1):
        outcomes.append(outcome)
        remaining = (time.perf_counter() - start) / number * (len(cells) - number)
        line = f"{number:4}/{len(cells)}  {outcome.status:8} {outcome.cell}  {outcome.seconds:.1f} s"
        print(f"{line}, about {remaining / 60:.0f} min to go  {outcome.reason}".rstrip(), flush=True)
        if time.perf_counter() - start > limit:
            break
    return outcomes, time.perf_counter() - start


INTRODUCTION = """
The leak matrix trains a tiny model with every optimizer in `keras.optimizers`, every variant of its options, and
every kind of training loop. Each cell of the table is one training. The model has a convolution, an embedding with
sparse gradients and two dense layers, and its masks change four times. After every execution of the compiled step,
both before and after prunekit processes that step, the test reads the raw variables with NumPy: every pruned weight
is exactly zero, every optimizer slot at pruned positions is zero, and no value is NaN or infinite. At the end the
sparsity is exact; the optimizer (class, config, attributes, variables), the constraints and the compiled functions
are restored to their state before the training; and the saved file, loaded again, has the same zeros.
`tests/support/leak_checks.py` defines these checks.
"""
FTRL = """
Ftrl's accumulator slot is an exception: Ftrl divides by it, and 0 / 0 is NaN. At pruned positions this slot has the
initial value that Keras gives it, which does not depend on the training data.
"""
BACKENDS = """
On JAX and PyTorch the tests run a subset of the matrix: every optimizer in every loop and every variant in every
loop, and on PyTorch also every optimizer with every variant. The loops there are `fit`, a second `fit`,
`train_on_batch`, a custom `train_step`, and a custom loop with `stateless_apply` or `backward()`.

The loops "quantized fit" and "quantized tape" train the model on integers of 4 bits while its zeros grow: `fit` with a
`QuantizationCallback`, and a custom loop with a `Quantizer`. "Clustered fit" trains it on four values for each weight,
with a `ClusterCallback`. All three are part of the subset on each backend.
"""
LEGEND = """
`LossScaleOptimizer` and `MultiOptimizer` wrap Adam and SGD here, and the variant applies to these inner optimizers.
In a tape loop, "3 steps per execution" means three updates in one compiled function, and `run_eagerly` means a
function that is not compiled. `mixed_float16` wraps the optimizer in a LossScaleOptimizer. A dash means that the
class has no `momentum` argument. "Keras" means that plain Keras fails in the same way; the notes give the reason. A
dot means that the cell did not run within the command's time limit; the cells that run first contain every pair of
values.
"""


def document(outcomes: Sequence[Outcome], command: str, seconds: float) -> str:
    """Returns the page: figures, the table, and its footnotes."""
    counts = Counter(outcome.status for outcome in outcomes)
    versions = " ".join(f"{name} {importlib.metadata.version(name)}," for name in ("keras", BACKEND, "numpy"))
    notes: dict[str, int] = {}
    rows = [_row(optimizer, variant, outcomes, notes) for optimizer in OPTIMIZERS for variant in VARIANTS]
    lines = [
        "# The leak matrix",
        "",
        *_paragraph(INTRODUCTION),
        "",
        f"- Cells run: {len(outcomes):,} of {len(leak_matrix.product()):,}: {counts['ok']:,} ok, "
        f"{counts['keras']} refused by plain Keras in the same way, "
        f"{counts['refused']} refused by prunekit, {counts['failed']} failed.",
        f"- Executions of the compiled step checked: {sum(o.batches for o in outcomes):,}.",
        f"- Values checked at pruned positions, in weights and slots: {sum(o.positions for o in outcomes):,}.",
        f"- Leaks found: {counts['failed']}.",
        f"- Versions: {versions} Python {platform.python_version()}.",
        f"- Command: `{command}`, {seconds / 60:.0f} minutes on {platform.machine()}.",
        "",
        *_paragraph(FTRL),
        "",
        *_paragraph(BACKENDS),
        "",
        *_paragraph(LEGEND),
        "",
        "| optimizer | variant | " + " | ".join(LOOPS) + " |",
        "|---|---|" + "---|" * len(LOOPS),
        *rows,
    ]
    if notes:
        lines += ["", "## Notes", "", *(f"{number}. {_escaped(text)}" for text, number in notes.items())]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _row(optimizer: str, variant: str, outcomes: Sequence[Outcome], notes: dict[str, int]) -> str:
    found = {outcome.cell: outcome for outcome in outcomes}
    entries = []
    for loop in LOOPS:
        outcome = found.get(Cell(optimizer, variant, loop))
        if outcome is None:
            entries.append("·" if leak_matrix.exists(optimizer, variant) else "–")
            continue
        note = f" [{notes.setdefault(outcome.reason, len(notes) + 1)}]" if outcome.reason else ""
        entries.append(SIGNS[outcome.status] + note)
    return f"| {optimizer} | {variant} | " + " | ".join(entries) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
